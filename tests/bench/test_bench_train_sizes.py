# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Operations, norms and tokens of a training step, by the sizes of a model; and the text that is trained on."""

import dataclasses

import pytest
import torch
from helpers import HAS_GPU
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_steps import CPU, build, loss_and_gradients, sizes_of, some_tokens

from bench.train import text
from bench.train.models import MODELS, USUAL, tiny
from bench.train.norms import ways_of

pytestmark = pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU")


@pytest.mark.parametrize("model", MODELS)
def test_operations_are_those_that_pytorch_counts(model):
    """But for causal attention: PyTorch counts the half that nobody computes too."""
    sizes = dataclasses.replace(sizes_of(model), kv_heads=4, vocabulary=320)
    way = next(iter(ways_of(model).values()))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_and_gradients(build(way, sizes, torch.float32), way, some_tokens(sizes))
    attention = (
        12 * sizes.layers * sizes.heads * sizes.head * sizes.length
    )  # of a token: both passes, all keys
    assert counter.get_total_flops() == sizes.tokens * (sizes.flops_per_token + attention // 2)


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_counted(model):
    built = next(iter(ways_of(model).values())).build(sizes_of(model), CPU)
    assert sum(type(each).__name__.endswith("RMSNorm") for each in built.modules()) == sizes_of(model).norms


def test_a_tiny_model_has_the_form_of_the_large_one():
    for name, sizes in MODELS.items():
        small = tiny(sizes)
        assert (small.has_qk_norm, small.eps) == (sizes.has_qk_norm, sizes.eps)
        assert small.heads % 8 == small.kv_heads % 8 == 0, f"{name}: eight processes have one head each"
    assert set(USUAL) == set(MODELS) - {"llama-8b"}


# Text


def test_batches_are_the_same_in_each_run_and_others_for_another_seed():
    words = torch.arange(50).to(torch.uint8)
    first, again, other = (next(text.batches(words, 3, 8, seed)) for seed in (0, 0, 1))
    assert first.dtype == torch.int64 and first.shape == (3, 9) and torch.equal(first, again)
    assert not torch.equal(first, other) and torch.equal(first, first[:, :1] + torch.arange(9))
    starts = torch.cat(
        [each[:, 0] for each, _ in zip(text.batches(words, 64, 8, 0), range(20), strict=False)]
    )
    assert starts.min() == 0 and starts.max() == 50 - 9, "every place, and none behind the end"


def test_validation_text_is_none_of_the_training_text(monkeypatch, tmp_path):
    for number in range(41):
        (tmp_path / f"m{number:02}.py").write_text(f"{number:02} ")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("others' ")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    training, validation = (bytes(each.tolist()).decode().split() for each in text.load_corpus())
    assert validation == ["00", "20", "40"] and len(training) == 38 and not set(training) & set(validation)
