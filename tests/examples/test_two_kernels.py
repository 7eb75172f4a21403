# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""examples/two_kernels.py as a module: its values, its bits, its errors, and its kernels compiled without a GPU."""

import importlib.util
import subprocess
import sys
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
    inputs = make_inputs(3, 8192, BF16, BF16)
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


def test_called_as_by_modules_of_tilegym(program):
    inputs = make_inputs(6, 77, BF16)
    expected = results(program, inputs)["y"]
    for shape in (None, 77, [77]):
        assert torch.equal(program.rms_norm(inputs.x, shape, inputs.weight, inputs.eps), expected)
    found = program.rms_norm(inputs.x, None, inputs.weight, inputs.eps, bias=None, mode="cached", offset=0.0)
    assert torch.equal(found, expected)


@pytest.fixture
def registered(program, monkeypatch):
    monkeypatch.setattr(program, "IMPLEMENTATIONS", dict(program.IMPLEMENTATIONS))
    return program.IMPLEMENTATIONS


def test_the_stub_runs_what_is_registered_last(program, registered):
    """And a decorated name is the function below it, not one that was registered before."""
    assert program.rms_norm.__name__ == "rms_norm" and program.rms_norm.__doc__
    assert registered == {("rms_norm", "cutile"): program.rms_norm_cutile}
    with pytest.raises(NotImplementedError, match="backend"):
        program.rms_norm(None, None, None, 0.5, backend="triton")
    register = program.register_impl("rms_norm", backend="cutile")
    first, last = (lambda *args, **kwargs: (1, args, kwargs)), (lambda *args, **kwargs: (2, args, kwargs))
    assert register(first) is first and register(last) is last
    for named in ({}, {"backend": "cutile"}):
        assert program.rms_norm(3, None, 4, 0.5, bias=5, **named) == (2, (3, None, 4, 0.5), {"bias": 5})


FIRST_CALL = """
import sys, torch
sys.path.insert(0, r"{folder}")
import two_kernels as program
torch.manual_seed(0)
x, weight, dy = (torch.randn(size, device="{device}") for size in ((33, 77), (77,), (33, 77)))
found = program.results(torch.compile(program.rms_norm, backend="aot_eager"), x, weight, dy)
exact = program.results(torch.nn.functional.rms_norm, x.double(), weight.double(), dy.double())
for each, expected in zip(found, exact, strict=True):
    torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-5)
"""


def test_the_first_call_of_a_process_may_be_compiled():
    """Dynamo traced the interpreter, and failed."""
    source = FIRST_CALL.format(folder=PATH.parent, device=DEVICE)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_differentiable_once(program):
    x = torch.ones(2, 8, device=DEVICE, requires_grad=True)
    y = program.rms_norm(x, (8,), torch.ones(8, device=DEVICE), 1e-6)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(input=None), TypeError, "input, weight: expected tensors of float16, .*NoneType"),
        (dict(input=torch.ones(2, 8, dtype=FP64)), TypeError, r"got \[torch.float64, torch.float32\]"),
        (dict(weight=None), TypeError, r"got \[torch.float32, .*NoneType"),
        (dict(weight=torch.ones(8, dtype=torch.int32)), TypeError, r"got \[torch.float32, torch.int32\]"),
        (dict(weight=torch.ones(1, 8)), ValueError, r"expected \(\*, N <= 8192\), \(N,\), \(N,\), got"),
        (dict(weight=torch.ones(7)), ValueError, r"got \(\(2, 8\), \(8,\), \(7,\)\)"),
        (dict(normalized_shape=(2, 8)), ValueError, r"got \(\(2, 8\), \(2, 8\), \(8,\)\)"),
        (dict(normalized_shape=7), ValueError, r"got \(\(2, 8\), 7, \(8,\)\)"),
        (dict(input=torch.ones(())), ValueError, r"got \(\(\), "),
        (dict(input=torch.ones(0, 8)), ValueError, r"got \(\(0, 8\), "),
        (dict(input=torch.ones(8, 2).t().to("meta")), ValueError, "as input on meta, got"),
        (dict(input=torch.ones(1, 8193), normalized_shape=None, weight=torch.ones(8193)), ValueError, "8193"),
        (dict(eps=None), TypeError, "eps, bias, offset: expected a float, None, 0, got .None, None"),
        (dict(bias=torch.ones(8)), TypeError, "bias.*got .*tensor"),
        (dict(offset=1.0), TypeError, "offset.*got .*1.0"),
    ],
    ids=str,
)
def test_refused_before_a_launch(program, monkeypatch, changed, error, message):
    monkeypatch.setattr(program, "launch", lambda *_: pytest.fail("launched"))
    arguments = dict(input=torch.ones(2, 8), normalized_shape=(8,), weight=torch.ones(8), eps=1e-6) | changed
    with pytest.raises(error, match=message):
        program.rms_norm(**arguments)


@pytest.mark.parametrize(
    ("architecture", "n", "dtype", "weight_dtype"),
    [
        (architecture, *case)
        for architecture in (80, 90, 100)
        for case in ((77, FP32, FP32), (4096, BF16, BF16))
    ]
    + [(80, 8192, BF16, FP32)],  # of the widest rows those that take most registers: 238 of 255
    ids=str,
)
def test_compiles_without_a_gpu(program, monkeypatch, tmp_path, architecture, n, dtype, weight_dtype):
    """No registers spill, and no warps wait for registers forever."""
    import compiling
    from cuda.tile.compilation import export_kernel

    compiling.skip_without_compiler()
    launches = []
    monkeypatch.setattr(program, "launch", lambda kernel, blocks, *args: launches.append((kernel, args)))
    x, weight = compiling.meta(1000, n, dtype=dtype), compiling.meta(n, dtype=weight_dtype)
    program.RMSNorm.apply(x.requires_grad_(), weight.requires_grad_(), 1e-6).sum().backward()
    assert len(launches) == 3
    for kernel, args in launches:
        cubin = tmp_path / "kernel.cubin"
        signature = compiling.signature_of(args[:-2], args[-2:])
        export_kernel(kernel, [signature], cubin, gpu_code=f"sm_{architecture}", output_format="cubin")
        registers, stack = compiling.resource_usage(cubin)
        workers = 8 if kernel is program.rms_norm_backward_dx else 4
        assert stack == 0 and compiling.lacking_registers(cubin, registers, workers) == 0
