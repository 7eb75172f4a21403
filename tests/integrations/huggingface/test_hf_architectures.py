# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Models of many architectures, patched: logits, gradients and state dicts beside those of the model as it is.

What a model computes in two orders of summation differs by its rounding errors. The bound of a gradient is taken from
the original: in bfloat16 what its gradient differs by from that of the same weights and the same model in float32, in
float32 some units of the last place.
"""

import collections

import pytest
import torch
from hf_models import ARCHITECTURES, results

from tilegym_rmsnorm import patch_model, unpatch_model

CASES = [
    pytest.param(case, id=case.name, marks=[] if case.is_fast else pytest.mark.slow) for case in ARCHITECTURES
]
DTYPES = [torch.float32, torch.bfloat16]


def joined(gradients):
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()])


def distance(gradients, others):
    """Compare all gradients at once, relative to their norm."""
    assert list(gradients) == list(others)
    return ((joined(gradients) - joined(others)).norm() / joined(others).norm()).item()


def test_enough_architectures_and_enough_of_them_in_the_fast_part():
    names = {case.name for case in ARCHITECTURES}
    assert len(names) == len(ARCHITECTURES) >= 24
    assert sum(case.is_fast for case in ARCHITECTURES) >= 8


@pytest.mark.parametrize("case", CASES)
def test_what_is_patched_and_what_is_declined(case):
    model = case.built()
    report = patch_model(model, patch_layers=True)
    assert collections.Counter(norm.arithmetic for norm in report.patched) == case.arithmetics
    assert (len(report.layers), len(report.attention)) == (case.layers, case.attention)
    assert collections.Counter(each.class_name for each in report.declined) == case.declined
    assert all(each.reason for each in report.declined)
    restored = unpatch_model(model)
    assert len(restored.restored) == len(report.patched) + case.layers + case.attention


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_patched_model_computes_and_learns_as_it_did(case, dtype, layers):
    original, ours = case.built().to(dtype), case.built().to(dtype)
    patch_model(ours, patch_layers=layers, backend="torch")
    logits, gradients = results(original, case.given(dtype))
    our_logits, our_gradients = results(ours, case.given(dtype))
    assert our_logits.dtype == logits.dtype and torch.equal(our_logits, logits)
    for name, gradient in gradients.items():
        assert our_gradients[name].dtype == gradient.dtype, name
    if dtype is torch.float32:
        # Of every parameter; a gradient that is zero but for rounding, such as of k's bias, counts beside the others.
        largest = max(gradient.norm() for gradient in gradients.values())
        for name, gradient in gradients.items():
            difference = (our_gradients[name] - gradient).norm()
            assert difference <= 16 * torch.finfo(dtype).eps * (gradient.norm() + 1e-3 * largest), name
    else:
        wide = case.built().to(dtype).float()  # weights as they are in bfloat16
        expected = results(wide, case.given(torch.float32))[1]
        rounding = distance(gradients, expected)
        assert distance(our_gradients, gradients) <= rounding
        # Gemma 3, in transformers 4.57, by six seeds: 0.92 to 1.11 times the original's.
        assert distance(our_gradients, expected) <= 1.2 * rounding


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_elsewhere(case, tmp_path):
    """The state dict is the original's, and what from_pretrained loads is a model of transformers alone."""
    original, ours = case.built(), case.built()
    patch_model(ours, patch_layers=True)
    expected, state = original.state_dict(), ours.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    original.load_state_dict(state, strict=True)
    ours.load_state_dict(expected, strict=True)
    ours.save_pretrained(tmp_path)
    again = type(original).from_pretrained(tmp_path)
    assert {type(part) for part in again.modules()} == {type(part) for part in original.modules()}
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert patch_model(again).counts["patched"] == sum(case.arithmetics.values())
