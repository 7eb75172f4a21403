# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": every branch of its kernels. Without a GPU they run in Triton's interpreter."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import rope_cases
import torch
import variants
from helpers import (
    BF16,
    DEVICE,
    FP32,
    HAS_GPU,
    assert_llama_rounds,
    assert_within,
    expected_results,
    make_inputs,
    why_skip,
)
from rope_cases import RopeCase
from variants import Variant

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.triton.config import BackwardConfig, ForwardConfig, Tile
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.reproducibility import BATCH, VLLM

needs_kernels = pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton")))

# 13 rows of 100 (or 96) columns, in every way that the kernels know
FORWARDS = {
    "one row": ForwardConfig("forward_rows", Tile(rows=1, width=128), num_warps=4),
    "rows per tile": ForwardConfig("forward_rows", Tile(rows=8, width=128), num_warps=4),
    "tiles per row": ForwardConfig("forward_rows", Tile(rows=4, width=32, tiles=4), num_warps=4),
    "chunks": ForwardConfig("forward_reread", Tile(rows=1, width=32, strips=4), num_warps=4),
}


def _backward(kernel="backward_dx", walks=3, c_tile=None, rows=1, width=128, **tile):
    tile = Tile(rows, width, **({"stages": 2} | tile))
    return BackwardConfig(kernel, tile, walks, num_warps=4, dw_width=64, c_tile=c_tile)


BACKWARDS = {
    "one row": _backward(),
    "a walk per row": _backward(walks=13),
    "one walk": _backward(walks=1),
    "rows per tile": _backward(rows=4),
    "walks without rows": _backward(rows=8, walks=5),
    "tiles per row": _backward(rows=2, width=32, tiles=4),
    "reread": _backward("backward_dx_reread", width=32, tiles=4),
    "strips": _backward(rows=2, width=32, strips=4, c_tile=Tile(rows=1, width=64, strips=2)),
    "strips of one row": _backward(width=32, strips=4, c_tile=Tile(rows=1, width=32, strips=4)),
}


def _spec(inputs):
    return Spec(inputs.x.shape[1], inputs.eps, inputs.offset, inputs.casting)


@needs_kernels
@pytest.mark.parametrize("name", BACKWARDS)
def test_llama_rounds_xhat_in_dw(name):
    from tilegym_rmsnorm.backends.triton import host_norm

    inputs = make_inputs(13, 100, BF16, FP32)
    tensors = (inputs.x, inputs.dy, inputs.weight, expected_results(inputs)["rstd"].truth.float(), None)
    llama, once = (
        host_norm.launch_backward(
            BACKWARDS[name], _spec(inputs._replace(casting=casting)), tensors, Wanted(BF16, dw=FP32)
        )[2]
        for casting in ("llama", "once")
    )
    assert_llama_rounds(inputs, {"dw": llama}, {"dw": once})


@needs_kernels
@pytest.mark.parametrize("margin", [0, 1])
def test_sms_are_left_free(monkeypatch, margin):
    from tilegym_rmsnorm.backends.triton import host, host_norm, launch

    used, launch_backward = [], host_norm.launch_backward
    monkeypatch.setattr(host, "sm_count", lambda device: 2)
    monkeypatch.setattr(
        host_norm, "launch_backward", lambda *call: used.append(call[0]) or launch_backward(*call)
    )
    inputs = make_inputs(9, 4096, BF16, FP32, seed=margin)
    expected = expected_results(inputs)
    tensors = (inputs.x, inputs.dy, inputs.weight, expected["rstd"].truth.float(), None)
    with settings.use_sm_margin(margin):
        dx, _, dw, _ = launch.rms_norm_backward(_spec(inputs), tensors, Wanted(BF16, dw=FP32))
    assert used[0].walks == (3, 2)[margin], (
        "two programs of 8 warps an SM, and no walk longer than it must be"
    )
    assert_within(expected, dx=dx, dw=dw)


@needs_kernels
def test_a_margin_of_all_sms_is_refused_before_any_launch(monkeypatch):
    from tilegym_rmsnorm.backends.triton import host, launch

    monkeypatch.setattr(host, "sm_count", lambda device: 2)
    inputs = make_inputs(3, 64, BF16, FP32)
    rstd = torch.ones(3, device=DEVICE)
    with settings.use_sm_margin(2):
        for run in (
            lambda: launch.rms_norm_forward(_spec(inputs), (inputs.x, inputs.weight, None, None)),
            lambda: launch.rms_norm_backward(
                _spec(inputs), (inputs.x, inputs.dy, inputs.weight, rstd, None), Wanted(BF16)
            ),
        ):
            with pytest.raises(ValueError, match="sm_margin: expected 0 to 1 for a GPU of 2 SMs, got 2"):
                run()


@needs_kernels
def test_arguments_are_named_as_parameters(monkeypatch):
    """Launches look arguments up by these names: another would reach no kernel, and one that is left out is None."""
    from tilegym_rmsnorm.backends.triton import host, launch
    from tilegym_rmsnorm.backends.triton.rows import stride_names

    absent, run = {}, host.run

    def checked(device, *launches):
        for kernel, _, arguments, _ in launches:
            assert not arguments.keys() - set(kernel.arg_names)
            name, without = (
                arguments.get("KERNEL"),
                {each for each in kernel.arg_names if arguments.get(each) is None},
            )
            absent[name] = absent.get(name, without) & without
        run(device, *launches)

    monkeypatch.setattr(host, "run", checked)
    for n in (64, 9000, 20000):
        size = (1, 2, 3, n)
        variant = Variant(BF16, size, weight="heads", bias_dtype=FP32, residual_dtype=FP32, alpha=0.5)
        x, weight, bias, residual, dy, d_residual_out = variants.make(variant)
        spec = variants.spec_of(variant)
        _, rstd, residual_out = launch.rms_norm_forward(spec, (x, weight, bias, residual))
        tensors = residual_out, dy, weight, rstd, d_residual_out
        launch.rms_norm_backward(spec, tensors, variants.wanted_of(variant))
    inputs = make_inputs(3, 64)
    as_vllm = _spec(inputs)._replace(reproducible=BATCH | VLLM)
    launch.rms_norm_forward(as_vllm, (inputs.x, inputs.weight, None, None))
    call = rope_cases.make(RopeCase(positions="each"), DEVICE)
    launch.qk_norm_rope_forward(call.spec, call.tensors)
    launch.qk_norm_rope_backward(call.spec, call.backward_tensors, call.wanted)
    of_rows = {"T", "H", "M", "alpha", "bias_ptr", *stride_names("x", "residual")} - {"x_row_stride"}
    of_backward = {
        "d_residual_out_ptr",
        "d_residual_ptr",
        "dx_ptr",
        "dw_partial_ptr",
        "db_partial_ptr",
        "alpha",
    }
    of_gradients = {f"d{each}_{of}_ptr" for each in "qk" for of in ("out", "weight_partial")}
    assert absent == {
        None: set(),  # sum_partials
        "forward_rows": {"n"},
        "forward_reread": {"M", "n"},
        "forward_vllm": {*of_rows, "residual_ptr", "residual_out_ptr"},
        "backward_dx": set(),
        "backward_dx_reread": {"c_ptr"},
        "backward_c": {"M", *of_backward, *stride_names("d_residual_out")},
        "rope_forward": {"STAGES", "q_programs", *of_gradients, *stride_names("dq_out", "dk_out")},
        "rope_backward": set(),
    }


@needs_kernels
def test_results_are_rounded_to_nearest_even():
    """Triton's own interpreter truncates to bfloat16, a bias towards zero in every result."""
    from tilegym_rmsnorm.backends.triton import host_norm

    weight = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.nan])  # ties to even, down and up
    ones = torch.ones(1, 128, dtype=BF16, device=DEVICE)  # rstd is 1, y the rounded weight
    spec = Spec(128, 0.0, 0.0, "once")
    y, *_ = host_norm.launch_forward(FORWARDS["one row"], spec, (ones, weight, None, None))
    torch.testing.assert_close(y[0], weight.to(BF16), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.skipif(HAS_GPU, reason="the interpreter runs where there is no GPU")
def test_the_interpreter_is_changed_once_for_all_threads():
    """Triton interprets with globals: two launches at once would each run programs of the other's number."""
    from triton.runtime.interpreter import InterpreterBuilder

    from tilegym_rmsnorm.backends.triton import host_norm

    inputs = make_inputs(13, 100, BF16, FP32)
    call = (FORWARDS["one row"], _spec(inputs), (inputs.x, inputs.weight, None, None))
    expected = host_norm.launch_forward(*call)[:2]
    cast = InterpreterBuilder.cast_impl
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(lambda _: host_norm.launch_forward(*call), range(12)):
            assert all(torch.equal(a, b) for a, b in zip(results[:2], expected, strict=True))
    assert InterpreterBuilder.cast_impl is cast


@needs_kernels
@pytest.mark.skipif(HAS_GPU, reason="of the interpreter")
def test_a_launch_replaces_the_language_once_and_restores_it(monkeypatch):
    """Triton does so in each call of a function inside a kernel, which took half the time of these tests."""
    import triton.language as tl
    from triton.runtime import interpreter

    from tilegym_rmsnorm import rms_norm
    from tilegym_rmsnorm.backends.triton import interpreter as ours

    replaced = []

    def replacing(function):
        replaced.append(function.__name__)
        return ours_replacing(function)

    ours_replacing = ours._replacing
    monkeypatch.setattr(ours, "_replacing", replacing)
    # Triton 3.5, that of torch 2.9, restores nothing: the first launch of the process replaces it for good
    restores = hasattr(interpreter, "_LangPatchScope")
    before, x, weight = tl.load, torch.randn(3, 8), torch.randn(8)
    for _ in range(2):
        y = rms_norm(x, 8, weight, 1e-3, backend="triton")
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), weight, 1e-3))
        assert tl.core.is_builtin(tl.load) is restores
        assert tl.load is before or not restores
    assert interpreter._patch_lang is ours._replaced_language
    # tl.sum is in a module that holds tl.core alone, which Triton never restores
    launches = replaced.count("forward")
    assert (launches == 2 if restores else launches <= 1) and len(replaced) <= 3, replaced
