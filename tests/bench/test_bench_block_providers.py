# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Who computes the benchmark's ops of a transformer block: libraries, PyTorch, and this package's backends."""

import sys

import pytest
import torch
from block_cases import EVERY_OP, SHAPE, computed, measured, reason
from fake_peers import FAKES
from helpers import why_skip

from bench.block import families
from bench.block import peers as block_peers
from bench.block import providers as block_providers
from bench.block.cell import run_op
from bench.block.families import CONTROLS, FAMILIES, make_inputs
from bench.block.providers import BlockProvider
from bench.providers import peers
from bench.providers.ours import OURS

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_op = pytest.mark.parametrize(("family", "op"), EVERY_OP, ids=[op for _, op in EVERY_OP])


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
    family = families.family_of("frozen_weight_backward")
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    for provider in block_peers.make_providers("quack", family, SHAPE, BF16, CPU):
        if "frozen_weight_backward" in provider.ops:
            run_op(family, provider, "frozen_weight_backward", inputs)
    assert seen and all(each["sm_count"] > 0 and "dw_partial" not in each for each in seen)


@every_op
def test_pytorchs_operations_are_called_right(family, op):
    """Decompositions run, as Inductor takes them; a CPU has no kernel of the backward."""
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
    if why := why_skip(backend, CPU):
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
    """A run of all families would take many minutes."""
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
    if why := why_skip("cutile", CPU):
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
    if why := why_skip("cutile", CPU):
        pytest.skip(why)
    (family,) = (each for each in FAMILIES if each.is_strided)
    (inputs,) = make_inputs(family, (8, 16400), BF16, CPU, sets=1)
    call = block_providers.own_provider("cutile").calls["qk_norm_forward"]
    assert block_providers.served_by("qk_norm_forward", call, inputs).startswith("composed around forward_")
    assert block_providers.served_by("qk_norm_forward", computed("qk_norm_forward"), inputs) == ""
