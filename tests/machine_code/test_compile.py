# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The kernels of the cutile backend, compiled by tileiras for every architecture, by a sample of the configs of all
widths up to WIDEST and some beyond: one at least of each kernel that serves there. --every-config compiles all of
Hopper's and of the tables, and a larger sample of the others."""

import functools
from collections import defaultdict

import helpers
import pytest
import torch
from table_cases import shipped_configs

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.rules import (
    ARCHITECTURES,
    backward_config,
    forward_config,
    row_partials_config,
    sum_config,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import partial_rows, size_class

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from compiling import (  # noqa: E402
    WIDEST,
    CompilingMachine,
    assert_ends,
    assert_sound,
    run_backward,
    run_forward,
    sampled,
    skip_without_compiler,
)

from tilegym_rmsnorm.backends.cutile.launch import Backward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.select import serves_dx_alone  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning.search import rows_of, weight_dtype_of  # noqa: E402

skip_without_compiler()

few_rows_config = functools.partial(backward_config, size="few")
dx_config = functools.partial(backward_config, has_dw=False)
few_dx_config = functools.partial(backward_config, size="few", has_dw=False)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMED_STACK = 24  # bytes that a table's config may spill: H200, float32 18432; bfloat16 16384 takes 8
SIBLINGS = (86, 89, 103)  # have the rules of sm_80 and sm_100


def step_of(itemsize: int, architecture: int) -> int:
    """Of which every how many-th config is sampled: all of Hopper's, which are measurements; elsewhere a third of those
    of 2-byte elements, half as many of float32, and fewer for siblings."""
    if architecture == 90:
        return 1
    return 9 if architecture in SIBLINGS else 6 if itemsize == 4 else 3


def widths_of_configs(
    configure, itemsize: int, architecture: int, among=range(1, WIDEST), with_tma=False
) -> list:
    """A sample of the configs that these widths get, or of those with TMA, each with the widest that is a multiple of
    16, or else the widest."""
    widths = {}
    for n in among:
        config = configure(n, itemsize, architecture)
        if configure is few_rows_config and config == backward_config(n, itemsize, architecture):
            continue  # tested as that of other sizes
        if (config.tma or not with_tma) and (n % 16 == 0 or widths.get(config, n) % 16):
            widths[config] = n
    return sampled(widths.items(), step_of(itemsize, architecture))


def run_dx(machine, config, n, dtype, weight_dtype, m=4096):
    run_backward(machine, config, n, dtype, weight_dtype, has_dw=False, m=m)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_configs(architecture, dtype):
    machine = CompilingMachine(architecture)
    for config, n in widths_of_configs(forward_config, dtype.itemsize, architecture):
        run_forward(machine, config, n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_backward_configs(architecture, dtype):
    machine = CompilingMachine(architecture)
    for config, n in widths_of_configs(backward_config, dtype.itemsize, architecture):
        run_backward(machine, config, n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_backward_configs_for_few_rows(architecture, dtype):
    machine = CompilingMachine(architecture)
    for config, n in widths_of_configs(few_rows_config, dtype.itemsize, architecture):
        run_backward(machine, config, n, dtype, dtype, m=128)
    assert_sound(machine)


@pytest.mark.parametrize("configure", [forward_config, backward_config, few_rows_config])
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_odd_widths(architecture, configure):
    """Bounds checks, and strides that are no multiple of 16 bytes."""
    machine = CompilingMachine(architecture)
    run = run_forward if configure is forward_config else run_backward
    for config, n in widths_of_configs(configure, 2, architecture, range(1, WIDEST, 2)):
        run(machine, config, n, BF16, BF16)
    assert_sound(machine)


@pytest.mark.parametrize("configure", [forward_config, backward_config])
@pytest.mark.parametrize("architecture", [80, 90])
def test_widths_that_are_no_multiple_of_16(architecture, configure):
    """Rows of these begin at multiples of 16 bytes, and their last tile is cut off at one."""
    machine = CompilingMachine(architecture)
    run = run_forward if configure is forward_config else run_backward
    for dtype, step in ((BF16, 8), (FP32, 4)):
        among = [n for n in range(step, WIDEST, step) if n % 16]
        for config, n in widths_of_configs(configure, dtype.itemsize, architecture, among):
            run(machine, config, n, dtype, dtype)
    assert_sound(machine)


VARIANTS = {
    "float16": dict(dtype=FP16, weight_dtype=FP16),
    "float32 weight": dict(dtype=BF16, weight_dtype=FP32),
    "llama casting": dict(dtype=BF16, weight_dtype=BF16, round_xhat=True),
    "no weight": dict(dtype=BF16, weight_dtype=None),
}


def one_width_per_kernel(architecture: int) -> tuple[int, ...]:
    """All of them for Hopper or with --every-config, else every second."""
    widths = (128, 2048, 5120, 18432, 40000, 65536)
    return widths if architecture == 90 or helpers.every_config else widths[::2]


@pytest.mark.parametrize("architecture", [80, 90, 120])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(architecture, variant):
    machine = CompilingMachine(architecture)
    for n in one_width_per_kernel(architecture):
        run_forward(machine, forward_config(n, 2, architecture), n, **VARIANTS[variant])
        has_dw = VARIANTS[variant]["weight_dtype"] is not None
        for size in ("few", "large"):
            config = backward_config(n, 2, architecture, size, has_dw)
            run_backward(machine, config, n, **VARIANTS[variant])
    assert_sound(machine)


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_frozen_weight_and_one_partial_row_per_row(architecture):
    machine = CompilingMachine(architecture)
    for n in one_width_per_kernel(architecture):
        for configure in (dx_config, few_dx_config):
            run_dx(machine, configure(n, 2, architecture), n, BF16, BF16)
        row_partials = row_partials_config(n, 2, architecture)
        run_backward(machine, row_partials, n, BF16, BF16, shares_partials=False)
    # Tiles by Hopper's rules: rows of two, with their warps.
    for n in (2048, 5120, 6144) if architecture == 90 else ():
        config = row_partials_config(n, 4, 90)
        run_backward(machine, config, n, FP32, FP32, shares_partials=False)
    for n in (33000, 33001):
        run_dx(machine, dx_config(n, 2, architecture), n, BF16, None)
    run_dx(machine, dx_config(40000, 4, architecture), 40000, FP32, FP32)
    assert_sound(machine)


@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_tma_of_single_rows_and_columns_and_of_odd_numbers(architecture):
    """Kernels apart: extents of 1 are compiled in, and which ones are multiples of 16. So few rows may spill."""
    machine = CompilingMachine(architecture)
    for dtype in (BF16, FP32) if architecture == 90 else (BF16,):
        numbers = (1, 33) if architecture == 90 and dtype is BF16 else (33,)
        for configure, run in (
            (forward_config, run_forward),
            (dx_config, run_dx),
            (backward_config, run_backward),
        ):
            for config, n in widths_of_configs(configure, dtype.itemsize, architecture, with_tma=True):
                for m in numbers:
                    run(machine, config, n, dtype, dtype, m=m)
            for m in (33, 4112):
                run(machine, configure(1, dtype.itemsize, architecture), 1, dtype, dtype, m=m)
    assert_ends(machine)


def test_a_kernel_that_asks_for_registers_that_its_block_lacks_is_seen():
    """As of 33 x 1, which never ended on an H100. By the rules no forward of tiles has TMA; rows of 1 are gathered."""
    machine = CompilingMachine(90)
    config = Config("tiles", 8, 4, 4, 4, rows=256, tma=True)
    run_forward(machine, config, 8, FP32, FP32, m=33)
    with pytest.raises(AssertionError, match="wait forever for registers"):
        assert_ends(machine)


@pytest.mark.parametrize("n", [50960, 58240, 65536, 67584, 81920, 98288, 131072])
def test_teams_of_the_widest_rows(n):
    machine = CompilingMachine(90)
    for dtype in (BF16, FP32):
        run_forward(machine, forward_config(n, dtype.itemsize, 90), n, dtype, dtype)
        run_backward(machine, backward_config(n, dtype.itemsize, 90), n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_configs_of_the_shipped_tables(op, dtype):
    shipped = shipped_configs(op, dtype)
    if dtype == "float16":  # what it shares is compiled as bfloat16, if at all
        shared = {
            (architecture, bucket.n, bucket.weight, config)
            for architecture, bucket, config in shipped_configs(op, "bfloat16")
        }
        shipped = [each for each in shipped if (each[0], each[1].n, each[1].weight, each[2]) not in shared]
    if not shipped:
        pytest.skip(f"no table that ships has an entry of {op} and {dtype}")
    machines, its_dtype = {}, getattr(torch, dtype)
    for architecture, bucket, config in sampled(shipped):
        weight_dtype = weight_dtype_of(bucket)
        machine = machines.setdefault(architecture, CompilingMachine(architecture))
        run = {"forward": run_forward, "backward": run_backward, "dx": run_dx}[op]
        for m in {rows_of(bucket)[0], 33 if config.tma else rows_of(bucket)[0]}:
            run(machine, config, bucket.n, its_dtype, weight_dtype, m=m)
            # dx alone. Rows then need fewer registers; test_compile_tma.py compiles some of those by TMA
            compiles_dx = config.kernel != "rows" or helpers.every_config
            if op == "backward" and compiles_dx and serves_dx_alone(config):
                run_dx(machine, config, bucket.n, its_dtype, weight_dtype, m=m)
    for machine in machines.values():
        assert_sound(machine, most_stack=TIMED_STACK)


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_a_backward_sums_by_the_config_for_its_kernel_and_architecture(architecture):
    machine = CompilingMachine(architecture, compiles=False)
    for n, size in ((2560, "large"), (8192, "large"), (65536, "large"), (18432, "few")):
        backward = Backward(machine, config := backward_config(n, 2, 90, size), n, True, True, False)
        assert backward.sum == sum_config(config, n, architecture)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [128, 2048, 4096, 5000, 40000, 65536])
def test_batch_sizes_and_eps_compile_nothing_new(n, weight_dtype):
    """Of each config, which a size class has alone or shares, one compilation for each class of M and of P that
    cuda-tile tells apart: 1, multiples of 16, others. The sum of dw has a config of its own, and no M."""
    symbols, expected = defaultdict(set), defaultdict(set)
    for m in (1, 2, 16, 100, 128, 1000, 4096, 5000, 65536, 131072, 524288):
        size = size_class(m, n)
        forward, backward = forward_config(n, 2, 90, size), backward_config(n, 2, 90, size)
        counting = CompilingMachine(90, compiles=False)
        for eps in (1e-6, 1e-5, 0.1):
            run_forward(counting, forward, n, BF16, weight_dtype, m=m, eps=eps)
            run_backward(counting, backward, n, BF16, weight_dtype, m=m)
        p = alignment(partial_rows(m, n, backward, counting.sm_count))
        keys = {
            "forward": (forward, alignment(m)),
            "backward": (backward, alignment(m), p),
            "sum": (sum_config(backward, n, 90), p),
            "clear": (forward, backward, alignment(m), p),
        }
        for name, found in counting.symbols.items():
            symbols[name] |= found
            expected[name].add(keys[name.partition("_")[0]])
    for name, found in symbols.items():
        assert len(found) <= len(expected[name]), f"{name}: {len(found)} compilations for {expected[name]}"


def alignment(extent: int) -> str:
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"
