# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A forward that a class of norms, layers or attention is given after its modules were patched runs, as it would run
without the patch."""

import copy
import functools
import logging
import pickle

import pytest
import torch
from hf_models import ARCHITECTURES, TOKENS, results
from hf_norms import norm_of, rows
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm

from tilegym_rmsnorm import patch_model, unpatch_model

(QWEN3,) = (case for case in ARCHITECTURES if case.name == "Qwen3")
CLASSES = [Qwen3RMSNorm, Qwen3DecoderLayer, Qwen3Attention]
OUTDATED = "its class was given another forward after the patch, which runs: call unpatch_model first"


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return wrapper


def halved(self, hidden_states, *args, **kwargs):
    """A forward of another signature and code than any class above has."""
    return (hidden_states / 2, None) if isinstance(self, Qwen3Attention) else hidden_states / 2


def models():
    original, ours = QWEN3.built(), QWEN3.built()
    assert patch_model(ours, patch_layers=True, backend="torch").counts["layers"] == 2
    return original, ours


def check_alike(original, ours, at_most=1e-5):
    expected, gradients = results(original, {"input_ids": TOKENS})
    logits, own = results(ours, {"input_ids": TOKENS})
    assert torch.equal(logits, expected) and own.keys() == gradients.keys()
    torch.testing.assert_close(own, gradients, rtol=at_most, atol=at_most)
    return logits


@pytest.mark.parametrize("new", [doubled, lambda forward: halved], ids=["wrapped", "another"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_it_runs_and_leaves(monkeypatch, cls, new):
    original, ours = models()
    before = check_alike(original, ours)
    with monkeypatch.context() as replaced:
        replaced.setattr(cls, "forward", new(cls.forward))
        logits = check_alike(original, ours)
        assert (logits - before).abs().max() > 1e-3
    assert torch.equal(ours(TOKENS).logits, before)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_of_copies_and_of_what_is_unpatched(monkeypatch, cls):
    original, ours = models()
    monkeypatch.setattr(cls, "forward", doubled(cls.forward))
    expected = original(TOKENS).logits
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(TOKENS).logits, expected)
    report = patch_model(ours, patch_layers=True, backend="torch")
    assert {each.reason for each in report.declined if each.class_name == cls.__name__} == {OUTDATED}
    assert torch.equal(ours(TOKENS).logits, expected)
    unpatch_model(ours)
    assert not any(hasattr(type(part), "patched_from") for part in ours.modules())
    assert torch.equal(ours(TOKENS).logits, expected)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_by_a_class_that_they_are_derived_from(monkeypatch, cls):
    derived = type(cls.__name__, (cls,), {})
    original, ours = QWEN3.built(), QWEN3.built()
    for model in (original, ours):
        for part in model.modules():
            if type(part) is cls:
                part.__class__ = derived
    report = patch_model(ours, patch_layers=True, backend="torch")
    assert report.counts["layers"] == report.counts["attention"] == 2
    monkeypatch.setattr(cls, "forward", halved)
    if "forward" in vars(derived):  # a layer of transformers gets one when it is derived
        monkeypatch.delattr(derived, "forward")
    check_alike(original, ours)


@pytest.mark.slow
def test_compiled_without_a_graph_break(monkeypatch):
    """One class after another, then all of them before the model is compiled."""
    torch._dynamo.reset()
    original, ours = models()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    before = compiled(TOKENS).logits
    assert torch.equal(before, original(TOKENS).logits)
    for cls in CLASSES:
        with monkeypatch.context() as replaced:
            replaced.setattr(cls, "forward", doubled(cls.forward))
            expected = original(TOKENS).logits
            assert torch.equal(compiled(TOKENS).logits, expected) and not torch.equal(before, expected)
    for cls in CLASSES:
        monkeypatch.setattr(cls, "forward", doubled(cls.forward))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert torch.equal(compiled(TOKENS).logits, original(TOKENS).logits)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_layer_that_is_checkpointed(monkeypatch, is_checkpointed):
    """transformers compares the forward of the class with its own wrapper, to checkpoint once."""
    original, ours = models()
    counted = []
    for model in (original, ours):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: counted.append(1))
        model.train()
    check_alike(original, ours)
    assert len(counted) == (4 if is_checkpointed else 2)
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", doubled(Qwen3DecoderLayer.forward))
    check_alike(original, ours)


@pytest.mark.parametrize(
    "given",
    [
        staticmethod(lambda x: 2 * x),
        functools.partialmethod(lambda self, factor, x: factor * x, 3),
        torch.neg,
        lambda self, x, gate=None: x if gate is None else x * gate,
    ],
    ids=["static", "partial", "builtin", "more"],
)
def test_any_kind_of_forward_is_called_as_without_the_patch(monkeypatch, given):
    class Norm(Qwen3RMSNorm):
        pass

    original, ours = norm_of(Norm), norm_of(Norm)
    patch_model(ours)
    monkeypatch.setattr(Norm, "forward", given, raising=False)
    assert torch.equal(ours(rows()), original(rows()))
    if given.__class__.__name__ == "function":
        assert torch.equal(ours(rows(), gate=2), 2 * rows()) and torch.equal(ours(rows(), 3), 3 * rows())


def test_a_norm_in_a_layer_says_so(monkeypatch, caplog):
    _, ours = models()
    monkeypatch.setattr(Qwen3RMSNorm, "forward", halved)
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        ours(TOKENS)
    told = (
        "Qwen3RMSNorm runs apart from the residual add: its class was given another forward after the patch"
    )
    assert [each.message for each in caplog.records].count(told) == 1
