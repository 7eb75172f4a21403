# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""bench.train under torch.compile, and the way whose norms Inductor compiles apart."""

import dataclasses

import pytest
import torch
from helpers import HAS_GPU
from training_steps import CPU, distances, sizes_of, way_and_step

from bench.train import measure
from bench.train.measure import Plan
from bench.train.norms import ways_of
from bench.train.ratios import LEAST_PAIRS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_gc"),
    pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU"),
]
MODEL = "decoder-2048-qk"
TEXTS = tuple(torch.arange(4000).remainder(97).to(torch.uint8).roll(number) for number in range(2))


@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.float32, 3e-6), (torch.bfloat16, 0.06)], ids=["float32", "bfloat16"]
)
def test_norms_that_inductor_compiles_apart_compute_the_same(dtype, far):
    loss, gradients = way_and_step("decoder-4096", "F.rms_norm", dtype)
    our_loss, our_gradients = way_and_step("decoder-4096", "regional", dtype)
    found = distances(our_gradients, gradients)
    assert max(found.values()) < far and abs(our_loss - loss) < 1e-3, found


def test_compiled_ways_are_measured(monkeypatch):
    """Each is one graph without breaks, whose losses are those of the first way; the runs of the same bits have one of
    their own."""
    monkeypatch.setattr(measure, "SAME_LAYERS", 1)
    plan = Plan(dataclasses.replace(sizes_of(MODEL), layers=1), True, 6, CPU)
    chosen = {name: ways_of(MODEL)[name] for name in ("F.rms_norm", "fused")}
    records = measure.measure(chosen, plan, TEXTS, lambda line: None)
    for each in records:
        assert each["error"] is None and (each["graphs"], each["graph_breaks"]) == (1, 0)
        assert len(each["step_s"]) == LEAST_PAIRS and each["first_step_s"] > max(each["step_s"])
        assert each["same_bits"] is True
    first, second = (each["losses"] for each in records)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < 2e-3
    assert len(records[0]["other_losses"]) == len(first) == 6
