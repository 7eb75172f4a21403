# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tiny models of bench.train, with weights of norms away from 1, and how far losses and gradients are from others."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from bench.train import traced
from bench.train.models import HUGGING_FACE, MODELS, Sizes, tiny
from bench.train.norms import Way, loss_of, ways_of

CPU = torch.device("cpu")


def sizes_of(model: str) -> Sizes:
    """Shrink a model. Skips where its library is not installed."""
    if model in HUGGING_FACE:
        pytest.importorskip("transformers", reason="transformers is not installed")
    return tiny(MODELS[model])


def away_from_one(model: nn.Module) -> nn.Module:
    """Give the norms weights that differ between columns and between norms: all else starts at 1."""
    vectors = [each for each in model.parameters() if each.ndim == 1]
    for number, vector in enumerate(vectors):
        vector.data = torch.linspace(0.4, 1.8, len(vector)).roll(number).to(vector)
    return model


def with_weights(way: Way) -> Way:
    """A way whose model starts with such norms."""
    return dataclasses.replace(way, build=lambda *given: away_from_one(way.build(*given)))


def some_tokens(sizes: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)


def build(way: Way, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """Build the same parameters each time, in this dtype."""
    torch.manual_seed(0)
    model = away_from_one(way.build(sizes, CPU))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.float32:  # qk_norm_rope refuses tables of less precision than q and k
        for buffer in model.buffers():
            buffer.data = buffer.data.float()
    return model.train()


def loss_and_gradients(model: nn.Module, way: Way, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a step of a model as a trainee does, without its optimizer."""
    parameters = dict(model.named_parameters())
    if way.change is None:
        loss = loss_of(model)(tokens)
        loss.backward()
    else:
        loss = traced.step_of(model, loss_of, tokens, way.change)(tokens)
    return loss.detach(), {name: each.grad for name, each in parameters.items()}


def way_and_step(
    model: str, name: str, dtype: torch.dtype, sizes: Sizes | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Build a model, and run a step of it by one way."""
    sizes = sizes or sizes_of(model)
    way = ways_of(model)[name]
    with way.around():
        return loss_and_gradients(build(way, sizes, dtype), way, some_tokens(sizes))


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """By name the norm of the difference over that of theirs."""
    assert ours.keys() == theirs.keys()
    pairs = {name: (ours[name].double(), theirs[name].double()) for name in ours}
    return {name: float((own - other).norm() / other.norm()) for name, (own, other) in pairs.items()}
