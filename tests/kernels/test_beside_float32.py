# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows of 16 bits beside a float32 weight, which have rules of their own: what those choose, and that it is right."""

import itertools

import pytest
import torch
from cutile_runs import run_backward, run_forward
from helpers import BF16, FP32, assert_within, expected_results, make_inputs
from planning import by_rules, device, problem, rules_of

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.launcher import launcher_of
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, OPS, PLAIN, SAME, Bucket, Policy
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows, ForwardRows, ForwardTeam
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.ops.norm.spec import Spec

CPU = torch.device("cpu")


def by_rules_beside_float32(op: str, n: int, size: str = "large", **options) -> Variant | None:
    """Choose by the rules for such a weight, without those beside a weight of x's dtype."""
    asked = problem(op, n, BF16, size, FP32, **options)
    assert asked.bucket.weight == FLOAT32
    for records in rules_of(asked.device.architecture).rules:
        if found := records.find(asked.bucket, asked.most_members, asked.is_aligned):
            return found[1]
    return None


def test_beside_a_float32_weight_a_thread_has_16_bytes_of_it_in_each_tile():
    """Wider tiles than four elements a thread would pass the weight through shared memory."""
    for op, size, n in itertools.product(OPS, SIZES, range(1, 66000)):
        variant = by_rules_beside_float32(op, n, size)
        if variant is None:
            continue
        assert n % 8 == 0 and variant.lanes >= n and variant.lanes - variant.width < n, (op, n, variant)
        if isinstance(variant, (ForwardRows, ForwardTeam)):
            assert variant.width == 4 * 32 * variant.warps, (n, variant)
    for n, architecture in ((4096, 100), (4096, 89), (4095, 90), (12300, 90)):
        assert by_rules_beside_float32("forward", n, architecture=architecture) is None
    assert by_rules_beside_float32("forward", 65536, facts=device(most_members=4)) is None
    assert problem("forward", 4096, FP32, weight=FP32).bucket.weight == SAME


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
def test_candidates_begin_with_the_rules_beside_a_float32_weight(op, architecture):
    from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates

    for n, size in itertools.product((64, 1000, 1024, 4096, 5120, 7168, 16384, 32768, 65536), SIZES):
        if rows_of_class(size, n):
            [first, *_] = candidates(Bucket(op, n, "bfloat16", size, FLOAT32), architecture, 8)
            expected = by_rules_beside_float32(op, n, size, architecture=architecture)
            assert first == (expected or by_rules(op, n, BF16, size, architecture=architecture).first)


# Of each rule a row whose last tile is cut off, and some that fill theirs.
@pytest.mark.parametrize(
    ("op", "size", "n"),
    [("forward", "large", n) for n in (2048, 4088, 8184, 12280, 20464, 32752, 40960, 65536)]
    + [("forward", "few", n) for n in (1000, 4088, 16368, 24560)]
    + [("backward", "large", n) for n in (4096, 7160, 8184, 15360, 16368)],
)
def test_kernels_beside_a_float32_weight(op, size, n):
    variant = by_rules_beside_float32(op, n, size)
    assert variant is not None
    inputs = make_inputs(5 if op == "forward" else 9, n, BF16, FP32, offset=1.0, device=CPU)
    run = run_forward if op == "forward" else run_backward
    assert_within(expected_results(inputs), **run(inputs, variant))


def test_rows_of_7169_to_8192_are_two_tiles_as_timed():
    """`two_tiles` would have one of 8192."""
    for n in (7176, 7424, 8176, 8192):
        variant = by_rules_beside_float32("backward", n)
        assert isinstance(variant, BackwardRows)
        assert (variant.width, variant.rest, variant.pieces) == (4096, 4096, 1)


def test_launch_chooses_by_the_dtype_of_the_weight():
    beside = by_rules_beside_float32("backward", 8192)
    for weight_dtype in (BF16, FP32):
        made = launcher_of(
            norm.BACKWARD,
            machine_of(CPU),
            ("backward", 8192, BF16, weight_dtype, "large", "once", PLAIN, Policy()),
        )
        assert (made.plan.first == beside) is (weight_dtype is FP32)
    x = torch.randn(3, 1000, dtype=BF16)
    for weight_dtype in (BF16, FP32, None):
        made = launcher_of(
            norm.FORWARD,
            machine_of(CPU),
            ("forward", 1000, BF16, weight_dtype, "few", "once", PLAIN, Policy()),
        )
        beside = by_rules_beside_float32("forward", 1000, "few")
        assert (made.plan.first == beside) is (weight_dtype is FP32)
        weight = None if weight_dtype is None else torch.randn(1000).to(weight_dtype)
        y, *_ = launch.rms_norm_forward(Spec(1000, 1e-6, 0.0, "once"), (x, weight, None, None))
        expected = torch.nn.functional.rms_norm(
            x.double(), (1000,), None if weight is None else weight.double(), 1e-6
        )
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=0)
