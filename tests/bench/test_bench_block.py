# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's ops of a transformer block: inputs, bytes, the check against float64, the records."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bench_records import RECORD_FIELDS
from block_cases import EVERY_OP, SHAPE, measured, reason, right

from bench.block import families
from bench.block.cell import run_op
from bench.block.check import kind_of
from bench.block.families import BLOCK_OPS, FAMILIES, by_family, compulsory_bytes, make_inputs
from bench.block.providers import BlockProvider
from bench.measure.run_shape import Bench
from bench.measure.shapes import OPS

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_op = pytest.mark.parametrize(("family", "op"), EVERY_OP, ids=[op for _, op in EVERY_OP])


# What is measured


def test_bytes_of_each_op():
    """A bf16 element with a residual takes 8, forward or backward, and 10 where two gradients are written."""
    rows, cols = 1 << 20, 256
    of_an_element = {op: compulsory_bytes(op, (rows, cols), BF16) / (rows * cols) for op in BLOCK_OPS}
    expected = {"forward": 4, "backward": 6}
    for op, found in of_an_element.items():
        most = {"residual_forward": 8, "residual_backward": 8, "scaled_residual_backward": 10}
        assert found == pytest.approx(most.get(op, expected[op.rpartition("_")[2]]), rel=0.01), op
    assert (
        compulsory_bytes("bias_backward", (1, 8), FP32) == 4 * (3 * 8 + 3 * 8) + 4
    )  # weight, dw and db; rstd
    assert compulsory_bytes("bias_forward", (1, 8), FP32) == 4 * (2 * 8 + 2 * 8) + 4
    assert compulsory_bytes("frozen_weight_backward", (2, 8), BF16) == 2 * (3 * 16 + 8) + 8
    assert compulsory_bytes("qk_norm_backward", (2, 8), BF16) == 2 * (3 * 16 + 2 * 8) + 8


def test_ops_by_family_plain_ones_first():
    ops = ("bias_backward", "dx", "residual_forward", "forward", "bias_forward")
    assert [(family and family.name, of) for family, of in by_family(ops)] == [
        (None, ("forward", "dx")),
        ("residual", ("residual_forward",)),
        ("bias", ("bias_forward", "bias_backward")),
    ]
    assert [family for family, _ in by_family(BLOCK_OPS)] == list(FAMILIES)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 24, 4096 * 4 * 28])
def test_rows_of_heads(rows):
    b, t, h = families.heads_of(rows)
    assert b * t * h == rows and min(b, t, h) >= 1


@every_family
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_inputs_are_what_models_have(family, dtype):
    one, two = make_inputs(family, SHAPE, dtype, CPU, sets=2)
    assert one.x.shape == one.dy.shape and one.x.numel() == SHAPE[0] * SHAPE[1] and one.rstd.shape == (24,)
    assert not torch.equal(one.x, two.x) and len({t.data_ptr() for t in (one.x, two.x, one.dy, two.dy)}) == 4
    assert (one.residual is not None) == (one.d_residual_out is not None) == family.has_residual
    assert (one.bias is not None) == family.has_bias
    exact = (one.normalized.double().square().mean(-1) + 1e-6).rsqrt().reshape(-1)
    torch.testing.assert_close(one.rstd.double(), exact, rtol=1e-5, atol=0)
    if family.has_residual:
        total = family.alpha * one.x.double() + one.residual.double()
        torch.testing.assert_close(one.normalized.double(), total, rtol=2**-7, atol=1e-4)
    if family.is_strided:
        b, t, h, cols = one.x.shape
        assert one.x.stride() == (t * 3 * h * cols, 3 * h * cols, cols, 1)
        assert one.dy.stride() == (h * t * cols, cols, t * cols, 1) and min(b, t, h) > 1
        assert torch.equal(one.packed, one.x.reshape(-1, cols)) and torch.equal(
            one.packed_dy, one.dy.reshape(-1, cols)
        )
        assert one.packed.is_contiguous() and one.packed_dy.is_contiguous()


# The check


@every_op
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_right_passes(family, op, dtype):
    (inputs,) = make_inputs(family, SHAPE, dtype, CPU, sets=1)
    assert reason(family, run_op(family, right(), op, inputs), inputs) is None


@every_op
def test_one_wrong_element_is_found(family, op):
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    outputs = run_op(family, right(), op, inputs)
    for name, tensor in outputs.items():
        wrong = tensor.clone(memory_format=torch.contiguous_format)
        rows = wrong.view(-1, wrong.shape[-1])
        rows[-1, rows[-1].abs().argmax()] *= 1.1
        text = reason(family, outputs | {name: wrong}, inputs)
        assert text is not None and text.startswith(f"{kind_of(name)} has a relative error of")
        wrong.view(-1)[0] = torch.nan
        assert reason(family, outputs | {name: wrong}, inputs)


FORGOTTEN = {
    "residual_forward": ("residual", ("y", "residual_out", "rstd")),
    "residual_backward": ("d_residual_out", ("dx",)),
    "scaled_residual_backward": ("d_residual_out", ("dx", "d_residual")),
    "bias_forward": ("bias", ("y",)),
}


@pytest.mark.parametrize("op", FORGOTTEN)
def test_an_input_that_is_not_read_is_found(op):
    forgotten, wrong = FORGOTTEN[op]
    family = families.family_of(op)
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    others = dataclasses.replace(inputs, **{forgotten: torch.zeros_like(getattr(inputs, forgotten))})
    text = reason(family, run_op(family, right(), op, others), inputs)
    assert text is not None and all(f"{name} has a relative error" in text for name in wrong)


def test_a_branch_that_is_not_multiplied_is_found():
    family = families.family_of("scaled_residual_backward")
    (inputs,) = make_inputs(family, SHAPE, FP32, CPU, sets=1)
    outputs = run_op(family, right(), "scaled_residual_backward", dataclasses.replace(inputs, alpha=1.0))
    text = reason(family, outputs, inputs)
    assert text is not None and text.startswith("dx has") and "d_residual" not in text


def test_the_sum_may_be_normalized_before_it_is_rounded_by_peers_alone():
    family = families.family_of("residual_forward")
    (inputs,) = make_inputs(family, (64, 1024), BF16, CPU, sets=1)
    outputs = run_op(family, right(), "residual_forward", inputs)
    total = inputs.x.double() + inputs.residual.double()
    outputs["residual_forward rstd"] = (total.square().mean(1) + 1e-6).rsqrt().float()
    assert "rstd has" in reason(family, outputs, inputs)
    assert reason(family, outputs, inputs, lenient=("it",)) is None
    outputs["residual_forward rstd"] *= 1.001
    assert "rstd has" in reason(family, outputs, inputs, lenient=("it",))


def test_outputs_of_another_form_are_refused():
    family = families.family_of("bias_backward")
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    dx, dw, db = right().calls["bias_backward"](inputs)
    for results in ((dx, dw, db.float()), (dx[1:], dw, db)):
        with pytest.raises(ValueError, match="bias_backward d[bx]: expected"):
            run_op(
                family,
                BlockProvider("it", {"bias_backward": lambda t, got=results: got}),
                "bias_backward",
                inputs,
            )


# Records


@every_family
def test_records_of_a_family(family, monkeypatch):
    records = measured(monkeypatch, family, right("one"), right("two"))
    assert [(each["op"], each["provider"]) for each in records] == [
        (op, name) for op in family.ops for name in ("one", "two")
    ]
    for record in records:
        assert set(record) == RECORD_FIELDS and record["error"] is None and record["us"] > 0
        moved = compulsory_bytes(record["op"], SHAPE, BF16)
        assert record["gb_per_s"] == pytest.approx(moved / record["us"] / 1e3, rel=0.01)
        assert set(record["errors"]) == {name for names in family.outputs.values() for name in names}


def test_a_backward_that_overwrites_dy_spoils_nobody_elses(monkeypatch):
    family = families.family_of("frozen_weight_backward")
    call = right().calls["frozen_weight_backward"]

    def in_place(t):
        (dx,) = call(t)
        return (t.dy.copy_(dx),)

    overwriting = BlockProvider("first", {"frozen_weight_backward": in_place}, overwrites_dy=True)
    records = measured(monkeypatch, family, overwriting, right("second"))
    assert [each["error"] for each in records] == [None, None]


def test_plain_ops_and_these_are_not_mixed_in_one_measurement():
    assert not set(OPS).intersection(BLOCK_OPS)
    with pytest.raises(ValueError):
        Bench(("torch",), ("forward", "bias_forward"), CPU).measure(SHAPE, BF16, print)
