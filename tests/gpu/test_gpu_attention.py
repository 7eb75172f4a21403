# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Attention of Hugging Face's, patched: norm and rotary embedding by one call of the kernels, as near to float64 as the
original."""

import copy

import pytest
from helpers import BF16, DEVICE

pytest.importorskip("transformers", reason="transformers is not installed")
from hf_models import ARCHITECTURES, TOKENS, results

from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import folding

# Experts have no products in float64.
DENSE = [case for case in ARCHITECTURES if case.name in ("Qwen3", "Qwen3_5", "Gemma3", "Exaone4")]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_patched_attention_is_as_near_to_float64(case, monkeypatch):
    calls = []
    original = folding.qk_norm_rope
    monkeypatch.setattr(
        folding, "qk_norm_rope", lambda *given, **options: calls.append(1) or original(*given, **options)
    )
    exact = case.built().to(DEVICE)
    theirs = copy.deepcopy(exact).to(BF16)
    exact.load_state_dict(theirs.double().state_dict())
    exact, theirs = exact.double(), theirs.to(BF16)
    ours = copy.deepcopy(theirs)
    report = patch_model(ours, patch_layers=True)
    given = {"input_ids": TOKENS.to(DEVICE)}
    (truth, of_truth), (logits, gradients), (our_logits, our_gradients) = (
        results(model, given) for model in (exact, theirs, ours)
    )
    assert len(report.attention) == case.attention == len(calls)
    pairs = [(our_logits, logits, truth)]
    pairs += [(our_gradients[name], gradients[name], of_truth[name]) for name in gradients]
    for mine, their, right in pairs:
        rounding = (their.double() - right).norm() + 1e-2 * right.norm()
        assert (mine.double() - right).norm() <= 1.2 * rounding
