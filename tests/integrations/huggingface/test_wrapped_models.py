# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Modules that accelerate has put hooks on, and those that fully_shard gives a class, before a patch and after it."""

import functools

import pytest
import torch
from hf_models import TOKENS, results
from hf_norms import LLAMA, norm_of, rows

from tilegym_rmsnorm import patch_model, unpatch_model


def hooked(module, hook):
    """Wrap as accelerate.hooks.add_hook_to_module: a wrapper on the module, and the forward it had behind it."""
    old = module.forward
    module._hf_hook, module._old_forward = hook, old

    def new_forward(module, *given, **named):
        hook.append(module)
        return module._old_forward(*given, **named)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    return module


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
def test_hooks_of_accelerate_stay_in_front(layers, calls):
    original, model = LLAMA.built(), LLAMA.built()
    seen = []
    for module in list(model.modules()):
        if not list(module.children()) or type(module).__name__ == "LlamaDecoderLayer":
            hooked(module, seen)
    model(TOKENS)
    per_call = len(seen)
    report = patch_model(model, patch_layers=layers)
    assert report.counts["patched"] == 5 and report.counts["layers"] == (2 if layers else 0)
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)
    assert len(seen) == 2 * per_call and len(calls) == 5
    unpatch_model(model)
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)
    assert len(seen) == 3 * per_call and len(calls) == 5


def test_a_hook_of_accelerate_can_be_removed_after_a_patch(calls):
    """remove_hook_from_module leaves the forward that was behind the hook on the module."""
    norm = hooked(norm_of(), [])
    expected = norm(rows())
    patch_model(norm)
    norm.forward = norm._old_forward
    del norm._old_forward, norm._hf_hook
    assert torch.equal(norm(rows()), expected) and len(calls) == 1
    assert patch_model(norm).counts["already"] == 1
    unpatch_model(norm)
    assert torch.equal(norm(rows()), expected) and len(calls) == 1


def test_a_class_given_after_the_patch_is_left(calls):
    """fully_shard gives a class to what it shards."""
    norm = norm_of()
    patch_model(norm)
    norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})
    report = unpatch_model(norm)
    assert report.declined == (("", "FSDPLlamaRMSNorm", "was given another class after the patch"),)
    norm(rows())
    assert len(calls) == 1 and patch_model(norm).counts["already"] == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_fully_sharded_before_or_after(mesh, is_first):
    from torch.distributed.fsdp import fully_shard

    expected, gradients = results(LLAMA.built(), {"input_ids": TOKENS})
    model = LLAMA.built()
    if is_first:
        patch_model(model, patch_layers=True, backend="torch")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    if not is_first:
        assert patch_model(model, patch_layers=True, backend="torch").counts["layers"] == 2
    logits, ours = results(model, {"input_ids": TOKENS})
    assert torch.equal(logits, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name].full_tensor(), gradient)
    report = unpatch_model(model)
    assert report.counts["restored"] == (5 if is_first else 7)
    assert [each.class_name for each in report.declined] == ["FSDPLlamaDecoderLayer"] * 2 * is_first
    assert torch.equal(model(TOKENS).logits, expected)
