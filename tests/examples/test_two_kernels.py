# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""examples/two_kernels.py as a module: its values, its bits, its errors, and its kernels compiled without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import helpers
import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, FP64, HAS_GPU, expected_results, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
if (reason := helpers.why_skip("cutile")) is not None:
    pytest.skip(reason, allow_module_level=True)

from tilegym_rmsnorm.backends.cutile import interpreter  # noqa: E402

PATH = Path(__file__).resolve().parents[2] / "examples/two_kernels.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(program, inputs) -> dict[str, torch.Tensor]:
    x, weight = (each.detach().requires_grad_() for each in (inputs.x, inputs.weight))
    y = program.rms_norm(x, x.shape[-1:], weight, inputs.eps)
    dx, dw = torch.autograd.grad(y, (x, weight), inputs.dy)
    return {"y": y.detach(), "dx": dx, "dw": dw}


def assert_same_bits(found, expected):
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)], ids=str
)
@pytest.mark.parametrize("n", [1, 77, 300])
@pytest.mark.parametrize("m", [1, 7, 5000 if HAS_GPU else 1000])
def test_values_and_bits(program, poisoned_empty, m, n, dtype, weight_dtype):
    """M below the grid and no multiple of the rows of a tile, N no power of two, outputs that held NaN."""
    inputs = make_inputs(m, n, dtype, weight_dtype)
    found = results(program, inputs)
    helpers.assert_within(expected_results(inputs), **found)
    assert_same_bits(results(program, inputs), found)


def test_the_widest_row(program, poisoned_empty):
    inputs = make_inputs(3, 16384, BF16, BF16)
    helpers.assert_within(expected_results(inputs), **results(program, inputs))


@pytest.mark.skipif(HAS_GPU, reason="the interpreter runs the blocks of CPU tensors in any order")
def test_the_order_of_the_blocks_does_not_change_a_bit(program, monkeypatch):
    inputs = make_inputs(1000, 300)
    first = results(program, inputs)
    launch = interpreter.launch
    grids = []

    def backwards(function, grid, args):
        grids.append(grid[0])
        launch(function, grid, args, order=range(grid[0])[::-1])

    monkeypatch.setattr(interpreter, "launch", backwards)
    assert_same_bits(results(program, inputs), first)
    assert len(grids) == 3 and min(grids) > 1


def test_any_strides_and_any_leading_dimensions(program, poisoned_empty, monkeypatch):
    """Kernels get contiguous arrays, whose compiled code serves all calls of a width."""
    launch = program.launch

    def launch_contiguous(kernel, blocks, *args):
        assert all(each.is_contiguous() for each in args if isinstance(each, torch.Tensor))
        launch(kernel, blocks, *args)

    monkeypatch.setattr(program, "launch", launch_contiguous)
    inputs = make_inputs(6, 77, FP32)
    found = results(program, inputs)
    wide = torch.full((2, 3, 2 * 77), torch.nan, device=DEVICE)
    weight = torch.full((2, 77), torch.nan, device=DEVICE).t()
    wide[..., ::2], weight[:, 0] = inputs.x.view(2, 3, 77), inputs.weight
    dy = inputs.dy[:1].expand(2, 3, 77)
    strided = inputs._replace(x=wide[..., ::2], weight=weight[:, 0], dy=dy)
    packed = inputs._replace(dy=dy.reshape(6, 77).contiguous())
    same = {
        name: each.view(6, 77) if each.ndim == 3 else each for name, each in results(program, strided).items()
    }
    assert_same_bits(same, results(program, packed))

    row = inputs._replace(x=inputs.x[0], dy=inputs.dy[0])
    assert torch.equal(results(program, row)["y"], found["y"][0])


def test_dispatch_takes_what_is_registered(program):
    assert program.rms_norm.__doc__
    x, weight = torch.ones(2, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    program.register_impl("rms_norm", backend="named")(lambda *args: args)
    assert program.rms_norm(x, (4,), weight, 0.5, backend="named") == (x, (4,), weight, 0.5)
    with pytest.raises(KeyError, match="triton"):
        program.rms_norm(x, (4,), weight, 0.5, backend="triton")


def test_differentiable_once(program):
    x = torch.ones(2, 8, device=DEVICE, requires_grad=True)
    y = program.rms_norm(x, (8,), torch.ones(8, device=DEVICE), 1e-6)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(input=None), TypeError, "input: expected a tensor of float16, .*NoneType"),
        (dict(input=torch.ones(2, 8, dtype=FP64)), TypeError, "input: .*got torch.float64"),
        (dict(weight=None), TypeError, "weight: .*NoneType"),
        (dict(weight=torch.ones(8, dtype=torch.int32)), TypeError, "weight: .*torch.int32"),
        (dict(weight=torch.ones(1, 8)), ValueError, r"expected \(\*, N <= 16384\), \(N,\), \(N,\), got"),
        (dict(weight=torch.ones(7)), ValueError, r"got \(\(2, 8\), \(8,\), \(7,\)\)"),
        (dict(normalized_shape=(2, 8)), ValueError, r"got \(\(2, 8\), \(2, 8\), \(8,\)\)"),
        (dict(input=torch.ones(())), ValueError, r"got \(\(\), "),
        (dict(input=torch.ones(0, 8)), ValueError, r"got \(\(0, 8\), "),
        (dict(input=torch.ones(8, 2).t().to("meta")), ValueError, "as input on meta, got"),
        (
            dict(input=torch.ones(1, 16385), normalized_shape=(16385,), weight=torch.ones(16385)),
            ValueError,
            "16385",
        ),
    ],
    ids=str,
)
def test_refused_before_a_launch(program, monkeypatch, changed, error, message):
    monkeypatch.setattr(program, "launch", lambda *_: pytest.fail("launched"))
    arguments = dict(input=torch.ones(2, 8), normalized_shape=(8,), weight=torch.ones(8), eps=1e-6) | changed
    with pytest.raises(error, match=message):
        program.rms_norm(**arguments)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_without_a_gpu(program, monkeypatch, tmp_path, architecture):
    """No registers spill, and no warps wait for registers forever."""
    import compiling
    from cuda.tile.compilation import export_kernel

    compiling.skip_without_compiler()
    launches = []
    monkeypatch.setattr(program, "launch", lambda kernel, blocks, *args: launches.append((kernel, args)))
    for n, dtype in ((77, FP32), (4096, BF16)):
        x, weight = (compiling.meta(*size, dtype=dtype).requires_grad_() for size in ((1000, n), (n,)))
        program.RMSNorm.apply(x, weight, 1e-6).sum().backward()
    assert len(launches) == 6
    for kernel, args in launches:
        cubin = tmp_path / "kernel.cubin"
        signature = compiling.signature_of(args[:-2], args[-2:])
        export_kernel(kernel, [signature], cubin, gpu_code=f"sm_{architecture}", output_format="cubin")
        registers, stack = compiling.resource_usage(cubin)
        workers = 8 if kernel is program.rms_norm_backward_dx else 4
        assert stack == 0 and compiling.lacking_registers(cubin, registers, workers) == 0
