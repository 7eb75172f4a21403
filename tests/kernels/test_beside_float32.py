# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows of 16 bits beside a float32 weight, which have configs of their own: which they are, and that they are right."""

import itertools

import pytest
import torch
from helpers import BF16, FP32, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES, beside_float32_config
from tilegym_rmsnorm.backends.cutile.plans.select import RULES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from cutile_runs import run_backward, run_forward  # noqa: E402

from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402

CPU = torch.device("cpu")


def test_beside_a_float32_weight_a_thread_has_16_bytes_of_it_in_each_tile():
    """That is four elements of x: of wider tiles the weight would pass through shared memory."""
    for op, size, n in itertools.product(("forward", "backward", "dx"), SIZES, range(1, 66000)):
        config = beside_float32_config(op, n, 2, 90, size)
        if config is None:
            continue
        assert n % 8 == 0 and config.lanes >= n and config.lanes - config.width < n, (op, n, config)
        assert n > 512 and (op == "forward" or (op, size) == ("backward", "large")), (op, size, n)
        if op == "forward" and config.kernel in ("rows", "teams"):
            assert config.width == 4 * 32 * config.warps, (n, config)
    for n, itemsize, architecture in (
        (4096, 4, 90),
        (4096, 2, 100),
        (4096, 2, 89),
        (4095, 2, 90),
        (12296, 2, 90),
    ):
        assert beside_float32_config("forward", n, itemsize, architecture, "large") is None
    assert beside_float32_config("forward", 65536, 2, 90, "large", most_members=4) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("op", RULES)
def test_candidates_begin_with_the_rules_beside_a_float32_weight(op, architecture):
    for n, size in itertools.product((64, 1000, 1024, 4096, 5120, 7168, 16384, 32768, 65536), SIZES):
        if rows_of_class(size, n):
            [first, *_] = candidates(Bucket(op, n, "bfloat16", size, FLOAT32), 2, architecture, 8)
            expected = beside_float32_config(op, n, 2, architecture, size)
            assert first == (expected or RULES[op](n, 2, architecture, size))


# Of each rule a row whose last tile is cut off, and some that fill theirs.
@pytest.mark.parametrize(
    ("op", "size", "n"),
    [("forward", "large", n) for n in (2048, 4088, 8184, 12280, 20464, 32752, 40960, 65536)]
    + [("forward", "few", n) for n in (1000, 4088, 16368, 24560)]
    + [("backward", "large", n) for n in (4096, 7160, 8184, 15360, 16368)],
)
def test_configs_beside_a_float32_weight(op, size, n):
    config = beside_float32_config(op, n, 2, 90, size)
    inputs = make_inputs(5 if op == "forward" else 9, n, BF16, FP32, offset=1.0, device=CPU)
    run = run_forward if op == "forward" else run_backward
    assert_within(expected_results(inputs), **run(inputs, config))


def test_rows_of_7169_to_8192_are_two_tiles_as_timed():
    """Not one of 8192, as `split` would have it."""
    for n in (7176, 7424, 8176, 8192):
        config = beside_float32_config("backward", n, 2, 90, "large")
        assert (config.width, config.rest, config.pieces) == (4096, 4096, 1)


def test_launch_takes_configs_by_the_dtype_of_the_weight():
    beside = beside_float32_config("backward", 8192, 2, 90, "large")
    for weight_dtype in (BF16, FP32):
        made = launch._backward(CPU, 8192, BF16, weight_dtype, True, False, "large", None)
        assert (made.config == beside) is (weight_dtype is FP32)
    x = torch.randn(3, 1000, dtype=BF16)
    for weight_dtype in (BF16, FP32, None):
        made = launch._forward(CPU, 1000, BF16, weight_dtype, False, "few")
        beside = beside_float32_config("forward", 1000, 2, 90, "few")
        assert (made.config == beside) is (weight_dtype is FP32)
        weight = None if weight_dtype is None else torch.randn(1000).to(weight_dtype)
        y, _ = launch.rms_norm_forward(x, weight, None, 1e-6, 0.0, "once")
        expected = torch.nn.functional.rms_norm(
            x.double(), (1000,), None if weight is None else weight.double(), 1e-6
        )
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=0)
