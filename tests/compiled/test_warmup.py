# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""warmup: after it no number of rows compiles anything."""

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import plain_calls
import pytest
import torch
from helpers import BF16, DEVICE, FP32

import tilegym_rmsnorm as tr
from tilegym_rmsnorm.backends import warmup

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from counting import CountingMachine, warm  # noqa: E402
from planning import problem  # noqa: E402
from table_cases import TARGET, entry_of  # noqa: E402

from tilegym_rmsnorm.backends import cutile  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward, plan_for  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host.warm import kind_of, rows_to_warm  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans import variants  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket, Policy, Problem  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_ROWS, SIZES, SMALL, rows_of_class, size_class  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime import tables  # noqa: E402

WIDTHS = (1, 64, 1000, 1024, 2880, 4096, 5000, 16384, 18432, 40000, 65536)


def call(
    machine: CountingMachine,
    m: int,
    n: int,
    dtype: torch.dtype = BF16,
    has_weight: bool = True,
    weight_dtype: torch.dtype | None = None,
    **others: Any,
) -> None:
    """A forward and a backward as launch.py runs them. weight_dtype: None for that of x. others: of Problem."""
    weight = machine.empty((n,), weight_dtype or dtype) if has_weight else None
    x, rstd, size = machine.empty((m, n), dtype), machine.empty((m,), FP32), size_class(m, n)
    asked = n, dtype, size, None if weight is None else weight.dtype, machine.facts
    forward = launcher(Forward, machine, problem("forward", *asked, **others))
    plain_calls.forward(forward, x, weight, 1e-6, 0.0)
    backward = launcher(Backward, machine, problem("backward" if has_weight else "dx", *asked, **others))
    plain_calls.backward(backward, x, x, weight, rstd, 0.0)


@functools.lru_cache(maxsize=8)
def launcher(kind: Callable[..., Launcher], machine: CountingMachine, asked: Problem) -> Launcher:
    """One for all numbers of rows of a size class, as calls have it."""
    return kind(machine, plan_for(asked))


def assert_nothing_new(machine: CountingMachine, counts: Iterable[int], n: int, **options: Any) -> set:
    """No number of rows compiles a kernel beside those that were warmed up, which it returns. options: of `call`."""
    warmed = set(machine.kernels)
    for m in counts:
        call(machine, m, n, **options)
        assert machine.kernels == warmed, f"M = {m} needs {machine.kernels - warmed}"
    return warmed


@pytest.mark.parametrize("sm_count", [132, 48])
@pytest.mark.parametrize("n", WIDTHS)
def test_every_kernel_of_any_number_of_rows(n, sm_count):
    chance = random.Random(n)
    counts = {*range(1, 200), *(2**k for k in range(24)), *(int(1.05**k) for k in range(1, 330))}
    counts |= {chance.randrange(1, 2**21) for _ in range(100)}
    for first in (FEW_ROWS, SMALL // n):
        counts |= {*range(max(1, first - 40), first + 200)}
    counts = {m for m in counts if m * n < 2**36}  # more are more than the memory of any GPU with teams holds
    for dtype in (BF16, FP32):
        machine = CountingMachine(sm_count)
        warm(machine, n, dtype, dtype)
        assert_nothing_new(machine, counts, n, dtype=dtype)


@pytest.mark.parametrize("n", [1024, 20000])
def test_every_kernel_with_sms_left_free(n):
    """Compiled kernels follow P, and P the margin."""
    machine = CountingMachine(132)
    with tr.use_sm_margin(13):
        warm(machine, n, BF16, BF16)
    counts = (*range(1, 50), *(2**k for k in range(24)), *(int(1.1**k) for k in range(1, 170)))
    assert_nothing_new(machine, counts, n, policy=Policy(sm_margin=13))
    # of the machine here; where there is a GPU it says so at once
    with pytest.raises(ValueError, match="sm_margin: expected 0 to 131"), tr.use_sm_margin(200):
        warm(machine, n, BF16, BF16)


@pytest.mark.parametrize(
    ("weight_dtype", "n"),
    [*((FP32, n) for n in (1024, 4096, 5120, 16384, 65536)), *((None, n) for n in (64, 4096, 18432, 40000))],
)
def test_every_kernel_beside_a_float32_weight_and_without_one(weight_dtype, n):
    machine = CountingMachine(132)
    warm(machine, n, BF16, weight_dtype)
    counts = {*range(1, 100), *(2**k for k in range(24)), *(int(1.05**k) for k in range(1, 330))}
    options = {"has_weight": weight_dtype is not None, "weight_dtype": weight_dtype}
    warmed = assert_nothing_new(machine, counts, n, **options)
    assert weight_dtype or not any(name.startswith(("backward_split", "sum")) for name, *_ in warmed)


SLABS = [(1, 1), (1, 8), (2, 4), (8, 8), (8, 24), (16, 256), (4, 1024), (128, 1024)]


@pytest.mark.parametrize(("rows", "slab"), SLABS)
@pytest.mark.parametrize(("n", "sm_count"), [(1000, 132), (3000, 7), (20000, 132)])
def test_the_rows_to_warm_have_every_pair_of_kinds(n, sm_count, rows, slab):
    """Pairs are of M and P, whatever slabs a table asks for. Beyond the slabs of the rules no kernel tells."""
    variant = variants.BackwardSplit(width=1, warps=8, occupancy=1, latency=1, rows=rows, strip=32, slab=slab)

    def partial(m):
        return variant.partial_rows(m, n, sm_count)

    for size in SIZES:
        needed = {(kind_of(m), kind_of(partial(m))) for m in rows_of_class(size, n)[:60_000]}
        chosen = rows_to_warm(n, size, variant, sm_count, partial)
        assert {(kind_of(m), kind_of(partial(m))) for m in chosen} == needed
        assert len(chosen) == len(needed) and all(size_class(m, n) == size for m in chosen)


def test_nothing_is_compiled_that_no_call_needs():
    machine = CountingMachine(132)
    warm(machine, 4096, BF16, BF16)
    warmed, machine.kernels = machine.kernels, set()
    for m in (*range(1, 1100), *range(1100, 6000, 7)):
        call(machine, m, 4096)
    assert machine.kernels == warmed


def test_entries_are_warmed(folders):
    numbers = {"width": 4096, "warps": 4, "occupancy": 2, "latency": 7}
    tiles = variants.BackwardTiles(width=4096, warps=8, occupancy=2, latency=2, rows=2)
    entries = [
        entry_of(Bucket("backward", 4096, "bfloat16", "few"), tiles),
        entry_of(Bucket("backward", 4096, "bfloat16", "large"), variants.BackwardRows(**numbers)),
        entry_of(Bucket("forward", 4096, "bfloat16", "large"), variants.ForwardRows(**numbers)),
    ]
    tables.update(folders[0], TARGET, entries)
    machine = CountingMachine(132, TARGET.gpu)
    warm(machine, 4096, BF16, BF16)
    warmed = assert_nothing_new(machine, (*range(1, 1100), *range(1100, 4000, 7)), 4096)
    names = {"backward_tiles", "backward_rows", "forward_rows", "sum_partials"}
    assert {name for name, *_ in warmed} == names


@pytest.mark.parametrize(
    ("width", "error"),
    [
        (4096, TypeError),
        ((4096,), TypeError),
        ((4096, "bfloat16"), TypeError),
        ((4096, BF16, "float32"), TypeError),
        ((0, BF16), ValueError),
        (("64", BF16), ValueError),
        ((True, BF16), ValueError),
        ((64, torch.int8), TypeError),
        ((64, torch.float64), TypeError),
        ((64, BF16, torch.float64), TypeError),
    ],
)
def test_widths_that_are_none(width, error):
    with pytest.raises(error, match="widths: expected"):
        tr.warmup([width])
    if error is ValueError:
        with pytest.raises(error, match=r"widths: expected a whole number of at least 1 as n, got "):
            tr.warmup(width)


@pytest.mark.parametrize("widths", [4096, None, "4096", BF16, 4096.0])
def test_what_is_no_sequence_of_widths(widths):
    """'int' object is not iterable."""
    with pytest.raises(TypeError) as raised:
        tr.warmup(widths)
    expected = "a sequence of (n, dtype) or (n, dtype, weight dtype), such as [(4096, torch.bfloat16)]"
    assert str(raised.value) == f"widths: expected {expected}, got {widths!r}"


@pytest.mark.parametrize(
    ("widths", "warmed"),
    [
        ((64, BF16), [(64, BF16, BF16)]),
        ((64, BF16, None), [(64, BF16, None)]),
        ((64, BF16, FP32), [(64, BF16, FP32)]),
        (((64, BF16), (128, FP32)), [(64, BF16, BF16), (128, FP32, FP32)]),
        ([(64, BF16)], [(64, BF16, BF16)]),
        (((n, BF16) for n in (64, 128)), [(64, BF16, BF16), (128, BF16, BF16)]),
        ((), []),
    ],
)
def test_widths_of_every_form_are_warmed(monkeypatch, widths, warmed):
    from tilegym_rmsnorm.backends.cutile.host import warm as warm_module

    seen = []
    monkeypatch.setattr(warmup, "why_unusable", lambda *_: None)
    monkeypatch.setattr(warm_module, "warm", lambda device, calls: seen.append(calls[:3]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tr.warmup(widths, device="cuda:0")
    assert seen == warmed


@pytest.mark.parametrize("asked", [None, torch.float16])
@pytest.mark.parametrize(
    ("dtype", "residual"), [(BF16, BF16), (BF16, FP32), (FP32, BF16), (BF16, torch.float16)]
)
def test_the_sum_that_is_warmed_has_the_dtype_of_a_call(monkeypatch, dtype, residual, asked):
    from tilegym_rmsnorm.backends.cutile.host import warm as warm_module

    seen = []
    monkeypatch.setattr(warmup, "why_unusable", lambda *_: None)
    monkeypatch.setattr(warm_module, "warm", lambda device, calls: seen.append(calls.residual_out))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tr.warmup((64, dtype), residual=residual, residual_dtype=asked, device="cuda:0")
    rows = torch.ones(1, 64)
    _, residual_out = tr.rms_norm(
        rows.to(dtype), 64, residual=rows.to(residual), residual_dtype=asked, backend="torch"
    )
    assert seen == [residual_out.dtype]


def test_what_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cutile, "_gpu_unusable", cutile._gpu_unusable.__wrapped__)
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")  # does not help
    with pytest.raises(tr.BackendUnavailableError, match="To mend it") as raised:
        tr.warmup([(64, BF16)])
    assert "INTERPRET" not in str(raised.value)
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        tr.warmup([(64, BF16)], device="cpu")
    with pytest.raises(ValueError, match="casting"):
        tr.warmup([(64, BF16)], casting="twice")


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("n", [64, 1024, 4096, 5120, 40000])
def test_no_call_compiles_after_it(n, weight_dtype, compilations):
    """Neither anew nor from the disk cache."""
    tr.warmup([(n, BF16, weight_dtype)])
    assert len(compilations) >= 3
    compilations.clear()
    for m in (1, 2, 3, 16, 17, 100, 128, 132, 264, 999, 1000, 1024, 2112, 4096, 5000, 16384):
        x = torch.randn(m, n, device=DEVICE, dtype=BF16, requires_grad=True)
        weight = None
        if weight_dtype is not None:
            weight = torch.ones(n, device=DEVICE, dtype=weight_dtype, requires_grad=True)
        tr.rms_norm(x, (n,), weight, 1e-5, offset=1.0, backend="cutile").sum().backward()
        assert not compilations, f"M = {m}: {compilations}"
