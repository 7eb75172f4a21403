# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Helpers of every test: where it runs, the sweep of shapes, inputs that discriminate, and measured tolerances.

A result is compared with the formula in float64, element by element. Its tolerance is

    (2 * low + floor) * scale + half a unit in the last place of the result

where scale is the sum of the magnitudes of the terms that the element is made of, low the largest error, in units of
scale and beyond the rounding of the result, that an independent implementation of the same precision makes on the same
inputs (ATen's F.rms_norm and its autograd; for casting="llama" the formula of Hugging Face's Llama), and floor the four
roundings that any implementation needs (square, mean, root, product), plus for dw a sum that grows as sqrt(M).
"""

import contextlib
import importlib.util
import itertools
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.registry import Request, why_unusable
from tilegym_rmsnorm.settings import AUTO_ORDER

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
BACKENDS = tuple(reversed(AUTO_ORDER))

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# The dtypes of x and weight.
DTYPE_PAIRS = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32), (BF16, None))

PATIENCE = 60  # seconds, of wait_for_the_gpu
every_config = False  # whether --every-config was given; conftest.py sets it
shared: Path | None = None  # a folder of all processes of this run; machine_code/conftest.py sets it
stderr = 2  # what pytest does not capture; conftest.py sets it

# name: (M, N) where an interpreter runs the kernels, (M, N) on a GPU
SHAPES = {
    "one element": ((1, 1), (1, 1)),
    "one column": ((5, 1), (4099, 1)),
    "7 columns": ((3, 7), (1001, 7)),
    "100 columns": ((13, 100), (5003, 100)),
    "heads": ((67, 64), (131075, 64)),
    "M below the grid": ((2, 1024), (5, 1024)),
    "2880 columns": ((5, 2880), (1027, 2880)),
    "4096 columns": ((3, 4096), (4095, 4096)),
    "4097 columns": ((3, 4097), (515, 4097)),
    "wide row": ((2, 18432), (37, 18432)),
}


class Inputs(NamedTuple):
    """One call: x and dy (M, N), weight (N,) or None."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None
    eps: float
    offset: float
    casting: str


class Expected(NamedTuple):
    """The float64 result, and the error that each element may have."""

    truth: Tensor
    tolerance: Tensor
    dtype: torch.dtype


def settle_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat interpreters as kernels on a GPU: "auto" takes them, their choice is kept, their calls become known. No
    choice outlasts the test, since the next one may turn the interpreter off."""
    monkeypatch.setattr(registry, "_BY_NAME_OFF_CUDA", ())
    monkeypatch.setattr(registry, "_chosen", {})


def why_skip(backend: str, device: torch.device = DEVICE) -> str | None:
    """One line on why the backend cannot run the op tests on this machine, None if it can."""
    unusable = why_unusable(backend, Request(device, FP32, FP32, "once"))
    return None if unusable is None else f"{backend}: {unusable.reason} ({unusable.remedy})"


def why_lacked(backend: str, request: pytest.FixtureRequest) -> str | None:
    """One line on why a law about an op (every_op.py) does not run on a backend, which lacks it; None for others."""
    op = getattr(request.node, "callspec", None) and request.node.callspec.params.get("op")
    if op is None or not hasattr(op, "forward"):
        return None
    name = op.forward._schema.name.partition("::")[2]
    return None if name in registry._implemented_ops(backend) else f"{backend} has no {name}"


def why_no_inductor() -> str | None:
    """One line on why torch.compile's own compiler cannot run on DEVICE, None if it can."""
    if HAS_GPU:
        return None if importlib.util.find_spec("triton") else "Inductor: Triton is not installed"
    # As Inductor looks for it: one name, which it runs without a shell. CXX="ccache g++" and clang++ alone fail there.
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "Inductor: there is no C++ compiler"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Inductor: there is no {header}, which its code includes"


needs_inductor = pytest.mark.skipif(why_no_inductor() is not None, reason=str(why_no_inductor()))


def shape(name: str) -> tuple[int, int]:
    """(M, N) of a row of SHAPES for the device that the tests run on."""
    return SHAPES[name][HAS_GPU]


def make_inputs(
    m: int,
    n: int,
    dtype: torch.dtype = BF16,
    weight_dtype: torch.dtype | None = FP32,
    *,
    eps: float = 1e-3,
    offset: float = 0.0,
    casting: str = "once",
    seed: int = 0,
    device: torch.device = DEVICE,
) -> Inputs:
    """Rows of scale 1/16 to 16, so that eps counts in some; an outlier column; weight + offset of both signs and away
    from 1; random dy whose rows differ in scale."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    x = normal(m, n) * torch.exp2(8 * uniform(m, 1) - 4)
    x[:, n // 2] *= 16
    dy = normal(m, n) * torch.exp2(4 * uniform(m, 1) - 2)
    weight = None
    if weight_dtype is not None:
        weight = ((0.3 + 1.7 * uniform(n)) * normal(n).sign() - offset).to(weight_dtype)
    return Inputs(x.to(dtype), dy.to(dtype), weight, eps, offset, casting)


def expected_results(inputs: Inputs) -> dict[str, Expected]:
    """Return the exact y, rstd, dx and dw, each with its tolerance."""
    x, dy, weight, eps, offset, casting = inputs
    m, n = x.shape
    x64, dy64 = x.double(), dy.double()
    factor = torch.ones(n, dtype=FP64, device=x.device) if weight is None else weight.double() + offset
    rstd = 1 / torch.sqrt(x64.square().mean(dim=1, keepdim=True) + eps)
    xhat, g = x64 * rstd, dy64 * factor
    product = dy64 * xhat

    truth = {
        "y": xhat * factor,
        "dx": (g - xhat * (xhat * g).mean(dim=1, keepdim=True)) * rstd,
        "dw": product.sum(0),
    }
    scale = {
        "y": truth["y"].abs(),
        "dx": (g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)) * rstd,
        "dw": product.square().sum(0).sqrt(),
    }
    low = dict(zip(("y", "dx", "dw"), _low_precision(inputs), strict=True))
    eps_compute = torch.finfo(
        FP64 if FP64 in (x.dtype, None if weight is None else weight.dtype) else FP32
    ).eps
    floor = {"y": 4 * eps_compute, "dx": 4 * eps_compute, "dw": (4 + math.sqrt(m) / 8) * eps_compute}

    expected = {}
    for name, value in truth.items():
        rounded = low[name]
        if rounded is None:
            continue
        rounding = _half_ulp(value, rounded.dtype)
        excess = ((rounded.double() - value).abs() - rounding).clamp(min=0) / scale[name].clamp(min=1e-300)
        tolerance = (2 * excess.max() + floor[name]) * scale[name] + rounding
        expected[name] = Expected(value, tolerance, rounded.dtype)
    rstd_dtype = FP64 if x.dtype == FP64 else FP32
    expected["rstd"] = Expected(rstd[:, 0], 4 * torch.finfo(rstd_dtype).eps * rstd[:, 0], rstd_dtype)
    return expected


def assert_within(expected: dict[str, Expected], **results: Tensor | None) -> None:
    """Each named result has the dtype, the shape and, within the tolerance, the values expected; no NaN passes."""
    for name, got in results.items():
        truth, tolerance, dtype = expected[name]
        assert got is not None and got.dtype == dtype and got.shape == truth.shape, f"{name}: {got}"
        error = (got.double() - truth).abs()
        wrong = ~(error <= tolerance)
        if wrong.any():
            worst = (error / tolerance).nan_to_num(nan=math.inf).argmax()
            at = tuple(int(i) for i in torch.unravel_index(worst, truth.shape))
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements beyond the tolerance, worst at {at}: "
                f"got {got[at].item()}, expected {truth[at].item()} within {tolerance[at].item():.3g}"
            )


BATCH = 20  # runs that follow one another on the GPU, as in training, without the host in between


def assert_alike(
    expected: dict[str, Expected], names: tuple[str, ...], run: Callable[[], tuple[Tensor, ...]], runs: int
) -> None:
    """The first run is within tolerance, and each of the others has its bits. A kernel that races passes a single
    check: one that was wrong in a third of its runs did."""
    first = run()
    assert_within(expected, **dict(zip(names, first, strict=True)))
    for start in range(1, runs, BATCH):
        numbers = range(start, min(start + BATCH, runs))
        gaps = torch.stack([_gaps(run(), first) for _ in numbers]).tolist()
        differing = {
            number: dict(zip(names, each, strict=True))
            for number, each in zip(numbers, gaps, strict=True)
            if each != [0] * len(names)
        }
        assert not differing, f"runs that differ from the first one, by at most: {differing}"


def wait_for_the_gpu(what: str = "") -> None:
    """Wait for the current stream, as torch.cuda.synchronize would, which waits forever for blocks that do. `what` runs
    there: this process says so and ends, since all else that it asked of the GPU would wait for them too."""
    ended = torch.cuda.Event()
    ended.record()
    deadline = time.monotonic() + PATIENCE
    while not ended.query():
        if time.monotonic() > deadline:
            os.write(stderr, f"blocks that wait forever {what}\n".encode())
            os._exit(1)
        time.sleep(0.001)


def in_turn(*values: Iterable[Any], of: int) -> list[tuple[Any, ...]]:
    """Combinations of a value of each, those whose places add up to a multiple of `of`, or all with --every-config: so
    each value of one meets some of another's, and the next value others."""
    placed = itertools.product(*(enumerate(each) for each in values))
    kept = (each for each in placed if every_config or sum(place for place, _ in each) % of == 0)
    return [tuple(value for _, value in each) for each in kept]


@contextlib.contextmanager
def skipped_where_fails(original: Callable[[], object]) -> Iterator[None]:
    """Skips a test that fails as `original` does, in which no code of this package runs: of some release of PyTorch or
    of transformers."""
    try:
        yield
    except RuntimeError as error:  # those of Dynamo and Inductor too
        try:
            original()
        except type(error) as same:
            pytest.skip(f"so does the original in this release: {str(same).strip().splitlines()[0]}")
        raise


@contextlib.contextmanager
def unchanged(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Check that a block leaves these tensors as they were."""
    there = [each for each in tensors if each is not None]
    before = [each.clone() for each in there]
    yield
    assert all(map(torch.equal, there, before))


def skip_without_every_config(is_left_out: bool = True) -> None:
    """Skip a case that --every-config alone asks."""
    if is_left_out and not every_config:
        pytest.skip("with --every-config")


def alignment(extent: int) -> str:
    """The classes of extents that cuda-tile compiles apart."""
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"


def assert_llama_rounds(inputs: Inputs, llama: dict[str, Tensor], once: dict[str, Tensor]) -> None:
    """`llama` and `once` hold y, dw or both, by either casting. Tolerances alone let "once" pass as "llama": here each
    must be close to its own formula and far from the other's. Not bit by bit, since another rstd may turn a rounding of
    xhat over. x is of 16 bits, weight and dw are float32."""
    x, dy, weight, eps, offset, _ = inputs
    xhat = x.double() / torch.sqrt(x.double().square().mean(dim=1, keepdim=True) + eps)
    rounded = xhat.to(x.dtype).double()
    if "y" in llama:
        assert weight is not None
        scale = weight.double() + offset
        expected = (rounded * scale).to(x.dtype)
        assert (llama["y"] == expected).float().mean() > 0.99
        assert (once["y"] == expected).float().mean() < 0.9
        assert (once["y"] == (xhat * scale).to(x.dtype)).float().mean() > 0.99
        assert (llama["y"].double() - once["y"].double()).norm() > 0.5 * ((rounded - xhat) * scale).norm()
    if "dw" in llama:
        effect = (dy.double() * (rounded - xhat)).sum(0).norm()
        assert (llama["dw"] - (dy.double() * rounded).sum(0)).norm() < 0.2 * effect
        assert (once["dw"] - (dy.double() * xhat).sum(0)).norm() < 0.2 * effect


def _gaps(results: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
    """The largest difference of each pair, NaN where one is NaN."""
    return torch.stack(
        [(one - other).abs().amax().double() for one, other in zip(results, others, strict=True)]
    )


def _low_precision(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, dx and dw by code that is not ours, in float32 with one rounding, or with casting="llama" the two of y."""
    x, dy, weight, eps, offset, casting = inputs
    y, dx, dw = _low_precision_once(x, dy, weight, eps, offset)
    if casting == "llama":
        y, dw = _low_precision_llama(x, dy, weight, eps, offset)  # its dx rounds where ours does not
    return y, dx, dw


def _low_precision_once(x, dy, weight, eps, offset):
    compute = FP64 if x.dtype == FP64 else FP32
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    factor = None if weight is None else weight.to(compute) + offset
    y = F.rms_norm(x.to(compute), x.shape[1:], factor, eps).to(x.dtype)
    leaves = [x] if weight is None else [x, weight]
    dx, *dw = torch.autograd.grad(y, leaves, dy)
    return y.detach(), dx, dw[0] if dw else None


def _low_precision_llama(x, dy, weight, eps, offset):
    wide = x.float()
    xhat = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
    if weight is None:
        return xhat, None
    y = ((weight.float() + offset) * xhat.float()).to(x.dtype)
    return y, (dy.float() * xhat.float()).sum(0).to(weight.dtype)


def _half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """An upper bound on the rounding of `value` to `dtype`."""
    info = torch.finfo(dtype)
    return (value.abs() * info.eps).clamp(min=info.smallest_normal * info.eps) / 2
