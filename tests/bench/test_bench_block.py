# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's ops of a transformer block: inputs, bytes, the check against float64, who computes them."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from bench_records import RECORD_FIELDS
from block_cases import EVERY_OP, computed, right
from fake_peers import FAKES

from bench import block, block_cell, block_peers, block_providers, measure, peers
from bench.block import BLOCK_OPS, CONTROLS, FAMILIES, by_family, compulsory_bytes, make_inputs
from bench.block_cell import run_op
from bench.block_check import errors_of, kind_of
from bench.block_providers import BlockProvider
from bench.cells import OURS
from bench.shapes import OPS
from tilegym_rmsnorm.measure.accuracy import why_wrong

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
SHAPE = (24, 64)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_op = pytest.mark.parametrize(("family", "op"), EVERY_OP, ids=[op for _, op in EVERY_OP])


def reason(family, outputs, inputs, lenient=()):
    """Why outputs are wrong, None where they are right."""
    errors, allowed = errors_of({"it": outputs}, inputs, lenient)
    assert set(errors["it"]) == {kind_of(name) for name in outputs}
    return why_wrong(errors["it"], allowed)


# What is measured


def test_bytes_of_each_op():
    """Of bf16: with a residual 8 a forward's element and a backward's, 10 where two gradients are written."""
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


def test_shapes_people_train_with():
    residual = FAMILIES[0].shapes
    sizes = [compulsory_bytes("residual_forward", shape, BF16) for shape in residual]
    assert {cols for (_, cols), size in zip(residual, sizes, strict=True) if size >= 200e6} == {
        *(2048, 4096, 5120, 7168, 8192, 16384)
    }
    assert min(sizes) < 10e6, "one with few rows"
    assert {cols for _, cols in block.family_of("bias_forward").shapes} == {2048, 4096, 5120, 7168, 8192}
    heads = {(block.heads_of(rows), size) for rows, size in block.STRIDED}
    assert {h for (b, t, h), _ in heads} == {8, 28, 32, 40} and {(b, t) for (b, t, _), _ in heads} == {
        (4, 4096)
    }
    assert {size for _, size in heads} == {64, 80, 96, 128, 160, 192, 256} and len(heads) == 28


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
    b, t, h = block.heads_of(rows)
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
    family = block.family_of(op)
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    others = dataclasses.replace(inputs, **{forgotten: torch.zeros_like(getattr(inputs, forgotten))})
    text = reason(family, run_op(family, right(), op, others), inputs)
    assert text is not None and all(f"{name} has a relative error" in text for name in wrong)


def test_a_branch_that_is_not_multiplied_is_found():
    family = block.family_of("scaled_residual_backward")
    (inputs,) = make_inputs(family, SHAPE, FP32, CPU, sets=1)
    outputs = run_op(family, right(), "scaled_residual_backward", dataclasses.replace(inputs, alpha=1.0))
    text = reason(family, outputs, inputs)
    assert text is not None and text.startswith("dx has") and "d_residual" not in text


def test_the_sum_may_be_normalized_before_it_is_rounded_by_peers_alone():
    family = block.family_of("residual_forward")
    (inputs,) = make_inputs(family, (64, 1024), BF16, CPU, sets=1)
    outputs = run_op(family, right(), "residual_forward", inputs)
    total = inputs.x.double() + inputs.residual.double()
    outputs["residual_forward rstd"] = (total.square().mean(1) + 1e-6).rsqrt().float()
    assert "rstd has" in reason(family, outputs, inputs)
    assert reason(family, outputs, inputs, lenient=("it",)) is None
    outputs["residual_forward rstd"] *= 1.001
    assert "rstd has" in reason(family, outputs, inputs, lenient=("it",))


def test_outputs_of_another_form_are_refused():
    family = block.family_of("bias_backward")
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


# Who computes them


def install(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name, made in FAKES[library]().items():
        monkeypatch.setitem(sys.modules, name, made)


@every_family
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("library", block_peers.LIBRARIES)
def test_every_setting_of_a_library_is_called_right(library, dtype, family, monkeypatch):
    install(monkeypatch, library)
    (inputs,) = make_inputs(family, SHAPE, dtype, CPU, sets=1)
    before = [tensor.clone() for tensor in inputs.tensors]
    providers = block_peers.make_providers(library, family, SHAPE, dtype, CPU)
    assert len({each.label for each in providers}) == len(providers)
    for provider in providers:
        for op in set(family.ops).intersection(provider.ops):
            outputs = run_op(family, provider, op, inputs)
            lenient = ("it",) if provider.is_lenient else ()
            assert reason(family, outputs, inputs, lenient) is None, (provider.label, op)
    assert all(map(torch.equal, before, inputs.tensors)), "inputs are as they were"


def test_which_ops_a_library_has():
    assert set(block_peers.LIBRARIES) <= set(peers.LIBRARIES)
    residual = {"residual_forward", "residual_backward"}
    for library, others in {
        "quack": {
            "qk_norm_forward",
            "qk_norm_backward",
            "bias_forward",
            "bias_backward",
            "frozen_weight_backward",
        },
        "liger.triton": {"qk_norm_forward", "qk_norm_backward", "frozen_weight_backward"},
        "liger.cutile": set(),
        "liger.cute": set(),
    }.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            install(monkeypatch, library)
            found = [
                each
                for family in FAMILIES
                for each in block_peers.make_providers(library, family, SHAPE, BF16, CPU)
            ]
        assert {op for each in found for op in each.ops} == residual | others


def test_a_backward_of_quack_without_dw_is_among_its_settings(monkeypatch):
    """Its heuristic's function always sums dw, which a frozen weight does not need."""
    install(monkeypatch, "quack")
    quack = sys.modules["quack.rmsnorm"]
    tuned, seen = quack.rmsnorm_bwd_tuned.fn, []
    quack.rmsnorm_bwd_tuned.fn = lambda *a, **options: seen.append(options) or tuned(*a, **options)
    family = block.family_of("frozen_weight_backward")
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    for provider in block_peers.make_providers("quack", family, SHAPE, BF16, CPU):
        if "frozen_weight_backward" in provider.ops:
            run_op(family, provider, "frozen_weight_backward", inputs)
    assert seen and all(each["sm_count"] > 0 and "dw_partial" not in each for each in seen)


@every_op
def test_pytorchs_operations_are_called_right(family, op):
    """By their decompositions, as Inductor takes them; a CPU has no kernel of the backward."""
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)

    def decomposed(function):
        return torch.compile(function, backend="aot_eager_decomp_partition", dynamic=False, fullgraph=True)

    calls = block_providers.torch_calls(decomposed)
    if op in CONTROLS.values():
        assert op not in calls
        return
    provider = BlockProvider("torch.compile", calls)
    assert reason(family, run_op(family, provider, op, inputs), inputs) is None


@every_op
def test_pytorch_alone_on_a_cpu_has_forwards(family, op):
    provider = block_providers.eager_provider(CPU)
    assert all(name.endswith("forward") for name in provider.ops)
    if op in provider.ops:
        (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
        assert reason(family, run_op(family, provider, op, inputs), inputs) is None


@every_op
@pytest.mark.parametrize("backend", ["torch", "cutile", "triton"])
def test_backends_are_called_right(backend, family, op):
    if backend != "torch":
        from helpers import why_skip

        if why := why_skip(backend):
            pytest.skip(why)
    provider = block_providers.own_provider(backend)
    if op in CONTROLS.values() and backend != OURS:
        assert op not in provider.ops
        return
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    assert reason(family, run_op(family, provider, op, inputs), inputs) is None


def test_names_without_these_ops_have_none():
    family = FAMILIES[0]
    assert block_peers.make_providers("tilegym", family, SHAPE, BF16, CPU) == []
    assert block_peers.make_providers("cutile[P=M]", family, SHAPE, BF16, CPU) == []
    assert {each.name for each in block_peers.make_providers("torch.compile", family, SHAPE, BF16, CPU)} == {
        "torch.compile"
    }


def test_settings_are_tried_of_the_add_alone(monkeypatch):
    """Of which a target names the best peer: a run of all families would take many minutes."""
    install(monkeypatch, "quack")
    names = ("quack", "torch.compile-max-autotune")
    for family in FAMILIES:
        found = {name: block_peers.make_providers(name, family, (24, 4096), BF16, CPU) for name in names}
        settings = {each.settings for each in found["quack"]}
        assert {"its heuristic", "without dw"} <= settings
        assert bool(found["torch.compile-max-autotune"]) == (family.name == "residual") == (len(settings) > 2)
        if family.name == "residual":
            kinds = {text.split(" ")[0] for text in settings - {"its heuristic", "without dw"}}
            assert (
                kinds == {"forward", "backward"}
                and any("partial_rows=" in text for text in settings) is False
            )


def test_few_rows_are_given_fewer_partial_rows(monkeypatch):
    install(monkeypatch, "quack")
    found = block_peers.make_providers("quack", FAMILIES[0], (5, 4096), BF16, CPU)
    assert any("partial_rows=5" in each.settings for each in found)


@pytest.mark.parametrize("version", ["0.6.4", "0.8.5"])
def test_liger_of_either_form_is_called_right(version, monkeypatch):
    """0.6.4 has neither needs_dw nor num_stages."""
    install(monkeypatch, "liger.triton")
    if version == "0.6.4":
        norm, fused = (sys.modules[f"liger_kernel.ops.{name}"] for name in ("rms_norm", "fused_add_rms_norm"))
        plain, added = norm.rms_norm_backward, fused.fused_add_rms_norm_backward
        monkeypatch.setattr(
            norm,
            "rms_norm_backward",
            lambda dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode: plain(
                dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode
            ),
        )
        monkeypatch.setattr(
            fused,
            "fused_add_rms_norm_backward",
            lambda dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place: added(
                dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, 2, in_place
            ),
        )
    for family in FAMILIES:
        (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
        [provider] = block_peers.make_providers("liger.triton", family, SHAPE, BF16, CPU)
        for op in set(family.ops).intersection(provider.ops):
            assert reason(family, run_op(family, provider, op, inputs), inputs, ("it",)) is None, op


# Which kernel serves


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_records_of_cutile_name_the_kernel(family, monkeypatch):
    from helpers import why_skip

    if why := why_skip("cutile"):
        pytest.skip(why)
    records = measured(monkeypatch, family, block_providers.own_provider("cutile"))
    assert [each["op"] for each in records] == list(family.ops)
    for record in records:
        direction = "forward_" if record["op"].endswith("forward") else "backward_"
        assert record["settings"].startswith(direction) and " warps=" in record["settings"], record
    settings = {each["op"]: each["settings"] for each in records}
    if family.is_strided:
        assert " heads=" in settings["qk_norm_forward"] and " heads=" not in settings["contiguous_forward"]


def test_what_pytorch_does_around_a_plain_kernel_is_said(monkeypatch):
    from helpers import why_skip

    if why := why_skip("cutile"):
        pytest.skip(why)
    family = FAMILIES[0]
    (inputs,) = make_inputs(family, (2, 20000), BF16, CPU, sets=1)
    call = block_providers.own_provider("cutile").calls["residual_forward"]
    assert block_providers.served_by("residual_forward", call, inputs).startswith("composed around forward_")
    assert block_providers.served_by("residual_forward", computed("residual_forward"), inputs) == ""


# Records


def measured(monkeypatch, family, *providers, ops=None):
    by_name: dict[str, list[BlockProvider]] = {}
    for each in providers:
        by_name.setdefault(each.name, []).append(each)
    monkeypatch.setattr(block_cell, "make_providers", lambda name, *_: by_name[name])
    bench = measure.Bench(tuple(by_name), ops or family.ops, CPU)
    return bench.measure(SHAPE, BF16, lambda step: None)


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


def test_one_that_is_wrong_is_not_timed_and_the_others_are(monkeypatch):
    family = FAMILIES[0]
    calls = right().calls

    def forgets(t):
        y, total, rstd = calls["residual_forward"](t)
        return y, t.x, rstd

    def raises(t):
        raise RuntimeError("no such kernel")

    records = measured(
        monkeypatch,
        family,
        dataclasses.replace(right("wrong"), calls=calls | {"residual_forward": forgets}),
        dataclasses.replace(right("raises"), calls=calls | {"residual_backward": raises}),
        BlockProvider("forward alone", {"residual_forward": calls["residual_forward"]}),
    )
    found = {(each["provider"], each["op"]): each for each in records}
    assert "residual_out has a relative error" in found["wrong", "residual_forward"]["error"]
    assert found["raises", "residual_backward"]["error"] == "RuntimeError: no such kernel"
    assert (
        found["raises", "residual_forward"]["us"] > 0 and found["forward alone", "residual_forward"]["us"] > 0
    )
    assert ("forward alone", "residual_backward") not in found


def test_a_backward_that_overwrites_dy_spoils_nobody_elses(monkeypatch):
    family = block.family_of("frozen_weight_backward")
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
        measure.Bench(("torch",), ("forward", "bias_forward"), CPU).measure(SHAPE, BF16, print)
