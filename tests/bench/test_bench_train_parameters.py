# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""All ways of a model train the very same parameters, and compute with them."""

import dataclasses

import pytest
import torch
from helpers import HAS_GPU
from training_steps import away_from_one, build, loss_and_gradients, sizes_of, some_tokens, way_and_step

from bench.train.measure import share
from bench.train.models import HUGGING_FACE, LARGE_VOCABULARY
from bench.train.norms import loss_of, ways_of

pytestmark = pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU")


def built_like(model, sizes, change):
    """All ways of a model, each with parameters of its own."""
    made = {name: build(way, sizes, torch.bfloat16) for name, way in ways_of(model).items()}
    first = next(iter(made.values()))
    for each in made.values():
        if each is not first:
            change(each, first)
    return made


@pytest.mark.parametrize("vocabulary", [256, LARGE_VOCABULARY])
@pytest.mark.parametrize("model", ["decoder-2048-qk", "qwen3-1.7b"])
def test_all_ways_share_the_very_same_parameters(model, vocabulary):
    """Tied embeddings have one tensor by two names."""
    sizes = dataclasses.replace(sizes_of(model), vocabulary=vocabulary, width=16, heads=2, kv_heads=2)
    made = built_like(model, sizes, share)
    first = next(iter(made.values()))
    expected = dict(first.named_parameters(remove_duplicate=False))
    is_tied = model in HUGGING_FACE and vocabulary == LARGE_VOCABULARY
    assert len(expected) - len(list(first.parameters())) == is_tied
    for name, each in made.items():
        found = dict(each.named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys(), name
        assert all(found[path] is expected[path] for path in expected), name
        assert len(list(each.parameters())) == len(list(first.parameters())), name


@pytest.mark.parametrize("model", ["decoder-2048-qk", "qwen3-1.7b"])
def test_a_shared_parameter_is_what_a_model_computes_with(model):
    """nn.RMSNorm in the place of another norm has its weight, and a patched one the one that it gets later."""
    made = built_like(model, sizes_of(model), share)
    first = next(iter(made.values()))
    away_from_one(first)
    for vector in (each for each in first.parameters() if each.ndim == 1):
        vector.data = vector.data.flip(0)
    losses = {}
    for name, each in made.items():
        if name == "liger" and not torch.cuda.is_available():
            continue  # Liger's kernels need a GPU
        way = ways_of(model)[name]
        with way.around():
            losses[name] = loss_of(each)(some_tokens(sizes_of(model))).item()
    # Ways round in other places, whereas another order of the weights is another loss.
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    separate = float(way_and_step(model, next(iter(made)), torch.bfloat16)[0])
    assert abs(separate - losses[next(iter(made))]) > 2e-3


def test_a_traced_step_sets_gradients_of_the_parameters_that_a_model_has_now():
    way, sizes = ways_of("decoder-4096")["traced"], sizes_of("decoder-4096")
    with way.around():
        model, other = (build(way, sizes, torch.bfloat16) for _ in range(2))
        share(model, other)
        loss, gradients = loss_and_gradients(model, way, some_tokens(sizes))
        again, _ = loss_and_gradients(model, way, some_tokens(sizes))
    assert all(each.grad is not None for each in other.parameters())
    assert torch.equal(loss, again), "it adds to no gradient, and changes no parameter"
    assert all(torch.equal(each.grad, gradients[name]) for name, each in other.named_parameters())
