# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope of the cutile backend in the interpreter, by its kernels and by PyTorch's operations around those of
rms_norm: each result against float64, inputs untouched, equal bits in any order of blocks."""

import dataclasses
import math

import cuda.tile as ct
import pytest
import torch
from cutile_runs import ShuffledMachine
from guarding import guarded_arrays
from helpers import BF16, FP16, FP32, in_turn, unchanged
from rope_cases import (
    CASES,
    WIDTHS,
    RopeCase,
    assert_xhat_is_rounded,
    cases_of_widths,
    check_backward,
    check_forward,
    make,
)

from tilegym_rmsnorm.backends.cutile import interpreter, launch
from tilegym_rmsnorm.backends.cutile.host import rope
from tilegym_rmsnorm.backends.cutile.host.launcher import bind
from tilegym_rmsnorm.backends.cutile.kernels import rope as kernels
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch
from tilegym_rmsnorm.ops.rope.spec import RopeWanted


def run_forward(call, machine=None):
    """Run the kernels; AssertionError if they do not take the call."""
    run = bind(rope.FORWARD, machine or ShuffledMachine(), call.spec, call.tensors)
    assert run is not None
    return run(call.tensors)


def run_backward(call, machine=None, wanted=None):
    tensors = call.backward_tensors
    run = bind(rope.BACKWARD, machine or ShuffledMachine(), call.spec, tensors, wanted or call.wanted)
    assert run is not None
    return run(tensors)


def is_taken(call):
    machine = ShuffledMachine()
    taken = bind(rope.FORWARD, machine, call.spec, call.tensors) is not None
    backward = bind(rope.BACKWARD, machine, call.spec, call.backward_tensors, call.wanted)
    assert taken is (backward is not None)
    return taken


def assert_composed(call):
    """Check PyTorch's operations around kernels of rms_norm."""
    assert not is_taken(call)
    check_forward(call, *launch.qk_norm_rope_forward(call.spec, call.tensors))
    check_backward(call, *launch.qk_norm_rope_backward(call.spec, call.backward_tensors, call.wanted))


def assert_case(case):
    """Forward and backward, each twice, by blocks in other orders. Nothing is read that is not written, and every
    element of a result is written."""
    call = make(case)
    with guarded_arrays(), unchanged(call.backward_tensors):
        for run, check in ((run_forward, check_forward), (run_backward, check_backward)):
            found, again = run(call), run(call, ShuffledMachine(seed=1))
            check(call, *found)
            assert all(interpreter.unwritten(each) == 0 for each in found if each is not None)
            assert all(same_bits(a, b) for a, b in zip(found, again, strict=True))


def same_bits(a, b):
    return a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("case", CASES)
def test_cases(case, interleaved):
    """Pairs side by side that lie at no multiple of 16 bytes are not for the kernels."""
    changed = CASES[case]._replace(interleaved=interleaved, rotary_dim=32 if interleaved else 64)
    if interleaved and case == "begun elsewhere":
        assert_composed(make(changed))
    else:
        assert_case(changed)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("n", "rotary_dim"), WIDTHS)
def test_widths(n, rotary_dim, interleaved):
    for case in cases_of_widths(n, rotary_dim, interleaved):
        if interleaved and (case.layout == "offset" or rotary_dim % 16 or (n - rotary_dim) % 8):
            assert_composed(make(case))
        else:
            assert_case(case)


@pytest.mark.parametrize(
    ("weight", "heads", "length"),
    in_turn(["vector", "heads"], [(16, 4), (31, 1), (12, 6), (1, 5)], [1, 7, 16, 33], of=3),
)
def test_many_tiles(weight, heads, length):
    """Blocks with several tiles and with none left; tiles that T or H cuts off, whose rows and heads add nothing even
    where an eps of 0 makes their rstd infinite."""
    case = RopeCase(BF16, length=length, heads=heads, n=32, rotary_dim=16, weight=(weight, weight), eps=0.0)
    assert_case(case)
    assert_case(case._replace(has_rows_of_batch=True, tables="half"))


def tiled(monkeypatch, **settings):
    """Have both kernels take these settings beside those that are reasoned."""
    tiles_of = rope.tiles_of

    def changed(kind, problem):
        variant = dataclasses.replace(tiles_of(kind, problem), **settings)
        variant.check(problem.n, problem.itemsize, problem.architecture)
        return variant

    monkeypatch.setattr(rope, "tiles_of", changed)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 1, "heads": 1, "k_rows": 1, "k_heads": 1},
        {"rows": 4, "heads": 4, "k_rows": 8, "k_heads": 2},
        {"rows": 2, "heads": 1, "k_rows": 1, "k_heads": 2},
        {"rows": 1, "heads": 8, "k_rows": 1, "k_heads": 2, "tma": False},
        {"width": 4, "pieces": 4, "rest": 16, "rests": 2, "latency": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "case", ["plain", "weights of heads of k", "one row of positions", "rows of each batch"]
)
def test_settings(case, settings, monkeypatch):
    tiled(monkeypatch, **settings)
    assert_case(CASES[case]._replace(rotary_dim=32, length=9))


def test_settings_are_logged_once(caplog):
    caplog.set_level("DEBUG", "tilegym_rmsnorm")
    call, machine = make(CASES["plain"]), ShuffledMachine()
    for _ in range(2):
        run_forward(call, machine)
        run_backward(call, machine)
    told = [each for each in caplog.messages if each.startswith("qk_norm_rope of ")]
    for kind, line in zip((rope.ForwardRope, rope.BackwardRope), told, strict=True):
        variant = rope.tiles_of(kind, rope.problem_of(machine, call.spec, call.tensors))
        assert line.endswith(f" columns: {variant}, reasoned (plans/rope.py)") and kind.kernel in line


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("positions", ["one", "each"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_outside_of_the_table(dtype, positions, interleaved):
    """Read no memory outside of it, and give NaN where the token is rotated, in its dx, and in dw."""
    case = RopeCase(BF16, positions=positions, n=96, rotary_dim=64, interleaved=interleaved)
    call = make(case._replace(position_dtype=dtype))
    rows = call.tensors[4].shape[0]
    far = (2**40, -(2**40), 2**32) if dtype is torch.int64 else (2**31 - 1, -(2**31), -2)
    for number, position in enumerate((-1, rows, *far)):
        call.tensors[6][-1, number] = position
    check_forward(call, *run_forward(call))
    check_backward(call, *run_backward(call))
    q_out = run_forward(call)[0]
    assert q_out[-1, :, :, :64].isnan().all() and not q_out[-1, :, :, 64:].isnan().any()


def test_sequences_come_one_behind_another_at_the_same_steps():
    """So that they find the rows of cos and sin that they share in L2."""
    heads = torch.empty(3, 10, 4, 8)
    places = [kernels.place_by_steps(heads, i, (8, 2, 8)) for i in range(12)]
    assert places[:7] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (0, 1, 0)]
    assert len(set(places)) == 12


def test_steps_past_the_last_read_no_row_that_no_step_has():
    """0 times what they would read there is NaN, and in dw."""
    call = make(RopeCase(FP32, length=5, positions="one"))
    call.tensors[6].clamp_(min=1)
    for table in call.tensors[4:6]:
        table[0] = math.inf
    check_backward(call, *run_backward(call))


@pytest.mark.parametrize("rounding", ["end", "norm", "each"])
@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_roundings_are_those_of_the_reference(dtype, casting, rounding):
    """Bit by bit: rows of as many ones as sevens have a mean square of 25, so that rstd is the same however it is
    computed, and all else is done element by element. Another casting or rounding has other bits."""
    case = RopeCase(dtype, n=64, rotary_dim=48, weight_dtype=FP32, offset=0.5, eps=0.0)
    call = make(case._replace(casting=casting, rounding=rounding))
    for x in call.tensors[:2]:
        order = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
        x.copy_(torch.tensor([1.0, -7.0, 7.0, -1.0]).repeat(16)[order])
    found, expected = run_forward(call), rope_forward_torch(call.tensors, call.spec)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for other in (
        {"casting": "once" if casting == "llama" else "llama"},
        *({"rope_rounding": each} for each in ("end", "norm", "each") if each != rounding),
    ):
        changed = rope_forward_torch(call.tensors, call.spec._replace(**other))
        assert not torch.equal(found[0], changed[0])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_dw_is_of_xhat_as_it_was_rounded(dtype):
    call = make(
        RopeCase(dtype, length=33, heads=(8, 4), n=32, rotary_dim=32, weight_dtype=FP32, casting="llama")
    )
    assert_xhat_is_rounded(call, *run_backward(call)[2:])


@pytest.mark.parametrize("wanted", [(None, None), (FP32, None), (None, FP16), (BF16, BF16)], ids=str)
def test_gradients_of_weights_that_are_not_wanted(wanted):
    """Are not computed, and nothing is launched for them. Both are summed in one launch."""
    call, machine = make(RopeCase(BF16, heads=(8, 2))), ShuffledMachine()
    all_of_them = run_backward(call)
    found = run_backward(call, machine, RopeWanted(*wanted))
    assert len(machine.grids) == 1 + any(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], all_of_them[:2], strict=True))
    for dw, complete, dtype in zip(found[2:], all_of_them[2:], wanted, strict=True):
        assert dw is None if dtype is None else dw.dtype is dtype
        assert dw is None or torch.allclose(dw.to(FP32), complete.to(FP32), rtol=2**-6, atol=1e-2)


def test_a_forward_is_one_launch():
    machine = ShuffledMachine()
    run_forward(make(RopeCase(BF16, heads=(8, 2))), machine)
    assert len(machine.grids) == 1


def test_q_and_k_may_be_one_tensor():
    call = make(RopeCase(BF16, heads=(4, 4)))
    call = call._replace(tensors=(call.tensors[0], call.tensors[0], *call.tensors[2:]))
    check_forward(call, *run_forward(call))
    check_backward(call, *run_backward(call))


COMPOSED = {
    "wide heads": RopeCase(BF16, n=520, rotary_dim=64),
    "wide heads, weights of heads": RopeCase(
        FP16, n=520, rotary_dim=520, weight=("heads", "vector"), interleaved=True
    ),
    "positions": RopeCase(
        BF16, n=576, rotary_dim=64, positions="each", tables="half", weight_dtype=FP32, offset=1.0
    ),
    "without k": RopeCase(FP32, n=520, rotary_dim=32, heads=(3, 0), weight=("none", "none"), layout="packed"),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_heads_that_no_kernel_takes(case):
    assert_composed(make(COMPOSED[case]))


def test_strides_of_more_than_32_bits_are_not_for_kernels():
    call = make(RopeCase(BF16, batch=1))
    q = call.tensors[0]
    far = q.as_strided(q.shape, (2**31, *q.stride()[1:]))
    assert_composed(call._replace(tensors=(far, *call.tensors[1:])))


def test_a_bound_call_runs_on_other_tensors():
    """Like those that it was bound for (contract.py)."""
    case = RopeCase(BF16, positions="one")
    call, other = make(case), make(case, seed=1)
    forward = launch.qk_norm_rope_forward.bind(call.spec, call.tensors)
    backward = launch.qk_norm_rope_backward.bind(call.spec, call.backward_tensors, call.wanted)
    check_forward(other, *forward(other.tensors))
    check_backward(other, *backward(other.backward_tensors))


def _sign(tn, trotation, PIECES, dtype, ROUND_EACH):
    cos, second_cos, sin, second_sin = trotation
    return (tn[0] * cos + tn[1] * sin, tn[1] * second_cos - tn[0] * second_sin) + tn[2:]


def _inverse(tdy, trotation, PIECES):
    """The inverse of a rotation by angles: the adjoint only where the tables' halves are equal."""
    cos, second_cos, sin, second_sin = trotation
    return (tdy[0] * cos + tdy[1] * sin, tdy[1] * second_cos - tdy[0] * second_sin) + tdy[2:]


def _clamped(TABLES, steps, place, ROWS):
    cos, _, positions, _ = TABLES
    batch = ct.minimum(place[0], positions[0].shape[0] - 1)
    tsteps = ct.minimum(place[1] * ROWS + ct.arange(ROWS, dtype=ct.int32), steps - 1)
    trows = ct.gather(positions[0], (batch, tsteps))
    return (ct.astype(ct.minimum(ct.maximum(trows, 0), cos.shape[0] - 1), ct.int32),)


def _pairs_alone(a, b, PIECES, ORDER, AXIS):
    return ct.sum(a[0] * b[0] + a[1] * b[1], axis=AXIS, keepdims=True)


MISTAKES = {
    "the sign of sin": ("rotated", _sign),
    "the inverse in place of the adjoint": ("rotated_back", _inverse),
    "positions are clamped": ("rows_of_steps", _clamped),
    "the mean is of what is rotated": ("sum_of_products", _pairs_alone),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checks_see(mistake, monkeypatch):
    name, function = MISTAKES[mistake]
    call = make(RopeCase(BF16, positions="each", rotary_dim=32))
    call.tensors[6][0, 0] = call.tensors[4].shape[0]
    check_forward(call, *run_forward(call))
    check_backward(call, *run_backward(call))
    monkeypatch.setattr(kernels, name, function)
    with pytest.raises(AssertionError):
        check_forward(call, *run_forward(call))
        check_backward(call, *run_backward(call))
