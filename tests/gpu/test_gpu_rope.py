# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope where it fills a GPU: right against float64; the same bits in many runs on outputs that begin as NaN,
and where streams race; and more than 2^31 elements."""

import functools

import pytest
import rope_calls
import torch
from helpers import BF16, DEVICE, FP16, FP32
from racing import STREAMS, assert_same_bits_racing
from rope_cases import RopeCase, make

from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import RopeSpec, RopeWanted

pytestmark = pytest.mark.parametrize("backend", ["cutile", "triton"], indirect=True)

# B, T, Hq, Hk, D, R
SHAPES = (
    (2, 1024, 32, 8, 128, 128),
    (1, 1031, 40, 8, 128, 128),
    (1, 512, 64, 8, 128, 128),
    (2, 700, 16, 16, 64, 64),
    (1, 1024, 16, 2, 256, 64),
    (2, 1024, 32, 8, 128, 32),
    (2, 512, 32, 8, 80, 80),
    (2, 1024, 16, 2, 256, 256),
    (1, 700, 8, 2, 512, 512),
    (1, 333, 5, 1, 96, 48),
    (64, 1, 32, 8, 128, 128),
    (3, 1, 8, 1, 64, 64),
)
FORMS = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "weights of heads": {"weight": "heads", "offset": 1.0},
    "no weights, half tables": {"weight": "none", "tables": "half"},
    "positions": {"positions": "each"},
    "tables of 16 bits, of each batch": {"has_rows_of_batch": True, "table_dtype": BF16},
    "interleaved, weights of heads": {"interleaved": True, "weight": "heads", "tables": "half"},
}
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}  # of the norm of the difference


@pytest.fixture(autouse=True)
def memory(request):
    """Outputs begin as NaN, unless a test takes memory as it is."""
    if getattr(request, "param", "of NaN") == "of NaN":
        request.getfixturevalue("poisoned_empty")


def call(shape, dtype, *, weight="vector", offset=0.0, seed=0, **options):
    """The tensors of a backward, with strided q and k and transposed gradients; the spec, and what is wanted."""
    b, t, hq, hk, d, r = shape
    case = RopeCase(
        *(dtype, b, t, (hq, hk), d, r),
        weight=(weight, weight),
        offset=offset,
        eps=rope_calls.EPS,
        layout="packed",
        **options,
    )
    made = make(case, DEVICE, seed)
    *others, cos, sin, positions = made.backward_tensors
    if case.has_rows_of_batch:  # the ops take (B, T, R), backends (B * T, R)
        cos, sin = (each.unflatten(0, (b, t)) for each in (cos, sin))
    return (*others, cos, sin, positions), made.spec, made.wanted


def run(tensors, spec, backend):
    """Outputs and gradients, by the ops."""
    numbers = *spec[1:-1], backend
    ops = torch.ops.tilegym_rmsnorm
    outputs = ops.qk_norm_rope_forward(*tensors[2:], *numbers)
    gradients = ops.qk_norm_rope_backward(*tensors, 3, *numbers)
    return [each for each in (*outputs, *gradients) if each is not None]


def assert_near(got, want, dtype):
    for one, other in zip(got, [each for each in want if each is not None], strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error <= TOLERANCE[dtype], error


def expected(tensors, spec, wanted):
    wide = [each.double() if each is not None and each.is_floating_point() else each for each in tensors]
    wanted = RopeWanted(*(None if dtype is None else torch.float64 for dtype in wanted))
    return *rope_forward_torch(wide[2:], spec), *rope_gradients_torch(wide, spec, wanted)


def assert_right_and_alike(made, dtype, backend, runs):
    tensors, spec, wanted = made
    first = run(tensors, spec, backend)
    assert_near(first, expected(tensors, spec, wanted), dtype)
    for _ in range(runs):
        again = run(tensors, spec, backend)
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_and_alike(shape, form, dtype, backend):
    options = FORMS[form] | ({"table_dtype": dtype} if "table_dtype" in FORMS[form] else {})
    assert_right_and_alike(call(shape, dtype, **options), dtype, backend, 20)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[9], SHAPES[10]], ids=str)
def test_positions_of_32_bits(shape, backend):
    made = call(shape, BF16, positions="each", position_dtype=torch.int32)
    assert_right_and_alike(made, BF16, backend, 20)
    tensors, spec, _ = made
    wide = run((*tensors[:-1], tensors[-1].long()), spec, backend)
    assert all(torch.equal(one, other) for one, other in zip(run(tensors, spec, backend), wide, strict=True))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6]], ids=str)
def test_a_thousand_runs(shape, backend):
    assert_right_and_alike(call(shape, BF16), BF16, backend, 1000)


@pytest.mark.parametrize("memory", ["of NaN", "as it is"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[10]], ids=str)
def test_streams_that_race(shape, form, backend, memory):
    """Fills with NaN would keep a call's first kernel from starting while the call before still runs."""
    each_made = [call(shape, BF16, **FORMS[form], seed=seed) for seed in range(STREAMS)]
    calls = [functools.partial(run, tensors, spec, backend) for tensors, spec, _ in each_made]
    alone = [each() for each in calls]
    for results, made in zip(alone, each_made, strict=True):
        assert_near(results, expected(*made), BF16)
    assert_same_bits_racing(alone, [f"result {i}" for i in range(len(alone[0]))], calls)


@pytest.mark.parametrize("rounding", ["norm", "each"])
@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_each_rounding(dtype, casting, rounding, backend):
    tensors, spec, wanted = call(SHAPES[0], dtype, casting=casting, rounding=rounding, table_dtype=dtype)
    want = *rope_forward_torch(tensors[2:], spec), *rope_gradients_torch(tensors, spec, wanted)
    got = run(tensors, spec, backend)
    assert_near(got, want, BF16)
    for one, other in zip(got[:2], want[:2], strict=True):  # rstd may differ in its last bit
        assert (one != other).float().mean() < 1e-2


@pytest.mark.much_memory
def test_more_than_2_to_the_31_elements(backend):
    b, t, hq, hk, d, r = 1, 2**17 + 70, 128, 2, 128, 128
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k = (torch.randn(b, t, h, d, device=DEVICE, dtype=BF16, generator=generator) for h in (hq, hk))
    dq_out, dk_out = q.flip(0).neg(), k.neg()
    weight, table = torch.rand(d, device=DEVICE, dtype=BF16), torch.randn(2, t, r, device=DEVICE)
    spec = RopeSpec(d, rope_calls.EPS, 0.0, r, False, "once", "end")
    whole = run((dq_out, dk_out, q, k, weight, weight, *table, None), spec, backend)
    last = slice(t - 130, t)
    parts = [each[:, last] for each in (dq_out, dk_out, q, k)]
    end = run((*parts, weight, weight, *table[:, last], None), spec, backend)
    for one, other in zip(whole[:4], end[:4], strict=True):
        assert torch.equal(one[:, last], other)
    assert all(each.isfinite().all() for each in whole[4:])


def test_a_dead_position_makes_no_fault(backend):
    """Positions far outside of the table: no illegal address, and NaN for their tokens alone."""
    tensors, spec, _ = call(SHAPES[0], BF16, positions="each")
    positions = tensors[8].clone()
    positions[:, ::7] = torch.tensor(2**40, device=DEVICE)
    positions[:, 1::7] = -(2**40)
    q_out, k_out = qk_norm_rope(*tensors[2:8], position_ids=positions, eps=spec.eps, backend=backend)
    torch.cuda.synchronize()
    is_dead = (positions < 0) | (positions >= tensors[6].shape[0])
    for out in (q_out, k_out):
        assert torch.equal(out.isnan().all(-1).all(-1), is_dead)
        assert torch.equal(out.isnan().any(-1).any(-1), is_dead)
