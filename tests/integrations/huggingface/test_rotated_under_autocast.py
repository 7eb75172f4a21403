# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Attention under autocast with float32 weights: the fold rounds q and k only where all that receives them would round
them, and the results are the original's bits."""

import functools
import re
from collections.abc import Callable

import pytest
import torch
import transformers
from attention_classes import Attention as WithoutValues
from attention_classes import D, N, assert_same, both_of, given
from hf_models import ARCHITECTURES, TOKENS, results
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from tilegym_rmsnorm import patch_model


class Attention(WithoutValues):
    def __init__(self):
        super().__init__()
        self.v_proj = nn.Linear(N, 2 * D)
        self.config = transformers.Qwen3Config(num_hidden_layers=2)
        self.config._attn_implementation = "sdpa"
        self.layer_idx, self.num_key_value_groups = 0, 2


AS_IN_4_57 = (
    "eager\n    if self.config._attn_implementation != 'eager':\n"
    "        attend = ALL[self.config._attn_implementation]\n"
)
CHOICE = "ALL.get_interface(self.config._attn_implementation, eager)\n"
if not hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
    CHOICE = AS_IN_4_57
SOURCE = """
def forward(self, x, tables, past=None, **kwargs):
    shape = (*x.shape[:-1], -1, 8)
    q = self.first(self.q_proj(x).view(shape)).transpose(1, 2)
    k = self.second(self.k_proj(x).view(shape)).transpose(1, 2)
    v = self.v_proj(x).view(shape).transpose(1, 2)
    cos, sin = tables
    q, k = rotary(q, k, cos, sin)
    if past is not None:
        options = {"sin": sin}
        k, v = past.update(k, v, self.layer_idx)
    attend: Callable = CHOICE
    y, _ = attend(self, q, k, v, None, dropout=0.0, scaling=0.3, **kwargs)
    return y, y
""".replace("CHOICE\n", CHOICE)
UPDATE, ATTEND = "k, v = past.update(k, v, self.layer_idx)\n", "    attend: Callable"
CALL = "y, _ = attend(self, q, k, v, None, dropout=0.0, scaling=0.3, **kwargs)"


def in_float32(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attend as the eager function of Flint."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    with torch.autocast("cpu", enabled=False):
        weights = torch.softmax(query.float() @ key.float().mT * scaling, -1)
        return (weights @ value.float()).transpose(1, 2), weights


SCOPE = {"Callable": Callable, "ALL": ALL_ATTENTION_FUNCTIONS, "eager": eager_attention_forward}


class Cache(DynamicCache):
    """A foreign cache, which might keep keys in float32."""


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("old", "new", "calls"),
    [
        ("", "", 1),
        (CHOICE, AS_IN_4_57, 1),
        ("self.layer_idx)\n", "self.layer_idx, options)\n", 1),
        (ATTEND, "    w = v * 2\n" + ATTEND, 1),
        (ATTEND, "    v = helper(v)\n" + ATTEND, 0),
        (ATTEND, "    q = q * 2\n" + ATTEND, 0),
        (ATTEND, "    k = k + k.mean()\n" + ATTEND, 0),
        (ATTEND, "    w = q.dtype\n" + ATTEND, 0),
        (ATTEND, "    torch.set_autocast_enabled('cpu', False)\n" + ATTEND, 0),
        (CALL, f"with torch.autocast('cpu', enabled=False):\n        {CALL}", 0),
        (CALL, "y, _ = attend(self, q, k, v, q.mean(), dropout=0.0, scaling=0.3)", 0),
        (CALL, CALL.replace("self, q", "self, q + 0"), 0),
        (CALL, "y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)", 0),
        (CALL, CALL + "\n    y = y + q.mean()", 0),
        (CALL, CALL.replace("attend", "helper"), 0),
        (CHOICE, re.sub(r"\beager\b(?!')", "helper_eager", CHOICE), 0),
        (UPDATE, "k, v = tables[0].update(k, v, 0)\n", 0),
    ],
)
def test_what_receives_q_and_k(class_of, folded, implementation, old, new, calls):
    assert old in SOURCE
    scope = {
        **SCOPE,
        "helper": lambda v, *others, **named: (others[1] @ others[1].mT, v) if others else v,
        "helper_eager": in_float32,
        "F": nn.functional,
    }
    original, ours = both_of(class_of(SOURCE.replace(old, new), base=Attention, **scope))
    for each in (original, ours):
        each.config._attn_implementation = implementation
    outputs = []
    for each in (original, ours):
        with autocast():
            try:
                outputs.append(each(**given())[0])
            except (RuntimeError, IndexError) as error:
                outputs.append(str(error))
    is_text = isinstance(outputs[0], str)
    assert outputs[0] == outputs[1] if is_text else torch.equal(*outputs)
    assert len(folded) == (1 if "helper_eager" in new and implementation == "sdpa" else calls)


@pytest.mark.parametrize(
    ("cache", "is_prefilled", "is_recorded", "calls"),
    [
        (DynamicCache, False, True, 3),
        (DynamicCache, False, False, 0),  # it may be read without autocast later
        (DynamicCache, True, True, 0),  # its keys are in float32 already
        (Cache, False, True, 0),
    ],
)
def test_caches(class_of, folded, cache, is_prefilled, is_recorded, calls):
    original, ours = both_of(class_of(SOURCE, base=Attention, **SCOPE))
    outputs = []
    for each in (original, ours):
        past, arguments = cache(), given()
        outputs.append([])
        for step, part in enumerate((slice(0, 3), slice(3, 4), slice(4, 5))):
            tables = tuple(table[:, part] for table in arguments["tables"])
            if is_prefilled and step == 0:
                past.update(torch.ones(2, 2, 1, D), torch.ones(2, 2, 1, D).bfloat16(), 0)
            with autocast(), torch.set_grad_enabled(is_recorded):
                outputs[-1].append(each(arguments["x"][:, part], tables, past)[0])
    assert all(map(torch.equal, *outputs))
    assert len(folded) == calls


def test_functions_that_are_registered_or_replaced_later(class_of, folded, monkeypatch):
    cls = class_of(SOURCE, base=Attention, **SCOPE)
    original, ours = both_of(cls)
    ALL_ATTENTION_FUNCTIONS.register("mine", in_float32)
    ALL_ATTENTION_FUNCTIONS.register("wrapped", functools.wraps(ALL_ATTENTION_FUNCTIONS["sdpa"])(in_float32))
    try:
        for name in ("mine", "wrapped"):
            for each in (original, ours):
                each.config._attn_implementation = name
            with autocast():
                assert_same(original, ours, given())
        for each in (original, ours):
            each.config._attn_implementation = "eager"
        cls.forward.__globals__["eager"] = in_float32
        with autocast():
            assert_same(original, ours, given())
    finally:
        for name in ("mine", "wrapped"):
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
    assert not folded


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Glm4Moe", "Gemma3"])
def test_models(name, dtype, attention, folded):
    """Float32 weights make q float32 again. Gemma 3 rounds it before the rotation, which no call does."""
    (case,) = (each for each in ARCHITECTURES if each.name == name)
    original, model = case.built().to(dtype), case.built().to(dtype)
    for each in (original, model):
        each.set_attn_implementation(attention)
    patch_model(model, patch_layers=True, backend="torch")
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = results(original, {"input_ids": TOKENS})
        logits, ours = results(model, {"input_ids": TOKENS})
    assert torch.equal(logits, expected)
    is_mixed = dtype is torch.float32
    assert len(folded) == (0 if is_mixed and name == "Gemma3" else case.attention)
    assert {each["rope_rounding"] for each in folded} <= {"end" if is_mixed else "each"}
    for name, gradient in gradients.items():
        assert ours[name].dtype is gradient.dtype
        assert (ours[name] - gradient).norm() <= 0.02 * gradient.norm(), name
