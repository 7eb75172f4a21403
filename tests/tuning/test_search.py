# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The search behind `python -m tilegym_rmsnorm tune`, of forms (plans/problem.py: FORMS), too: its candidates, what it
times, checks and refuses, and its choices, with a timer that says what it is told."""

import dataclasses
import itertools
import math

import planning
import pytest
import torch
from cutile_runs import set_launcher
from helpers import Inputs, make_inputs
from hypothesis import assume, given
from hypothesis import strategies as st
from table_cases import TARGET, entry_of

from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher, find
from tilegym_rmsnorm.backends.cutile.plans import problem, rules, variants
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FORMS,
    ITEMSIZE,
    OPS,
    PLAIN_ROWS,
    RESIDUAL,
    Bucket,
    Device,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.records import Records
from tilegym_rmsnorm.backends.cutile.plans.select import choose as chosen_by
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardRows,
    BackwardSplit,
    BackwardTiles,
    ForwardTiles,
)
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.tuning import calls, search
from tilegym_rmsnorm.backends.cutile.tuning.candidates import by_rules, candidates, fits_registers
from tilegym_rmsnorm.measure import accuracy


@given(n=st.one_of(st.integers(1, 5000), st.integers(5000, 2**27)), size=st.sampled_from(SIZES))
def test_rows_at_which_a_bucket_is_timed_are_of_its_class(n, size):
    of_class = rows_of_class(size, n)
    assume(of_class)
    rows = search.rows_of(Bucket("forward", n, "bfloat16", size))
    assert rows
    for m in rows:
        assert m in of_class
        assert m <= 16 or m % 16 == 0 or not any(each % 16 == 0 for each in of_class[:16])


def test_rows_at_which_common_widths_are_timed():
    def rows(size, n):
        return search.rows_of(Bucket("backward", n, "bfloat16", size))

    assert [rows("few", n) for n in (64, 4096, 65536)] == [(1024, 128, 16), (1024, 128, 16), (64, 8, 1)]
    assert [rows("small", n) for n in (64, 1024, 4080)] == [(65536, 8192), (4096, 1040), (1028, 1025)]
    assert [rows("large", n) for n in (64, 4096, 65536)] == [
        (2097152, 1048576, 524288),
        (32768, 16384, 8192),
        (2048, 1024, 512),
    ]
    assert [rows("large", n) for n in (2880, 12288, 18432)] == [
        (32768, 16384, 8192),
        (8192, 4096, 2048),
        (4096, 2048, 1024),
    ]
    assert search.rows_of(Bucket("dx", 4096, "float32", "large")) == (16384, 8192, 4096)


# On the interpreter


FORWARD = Bucket("forward", 64, "bfloat16", "large")
BACKWARD = Bucket("backward", 64, "float32", "small")
FEW = BACKWARD._replace(size="few")
DX = BACKWARD._replace(op="dx")
TILES, BACKWARD_TILES = (
    [kind(width=64, warps=4, occupancy=1, latency=latency, rows=8) for latency in (1, 2, 3)]
    for kind in (ForwardTiles, BackwardTiles)
)
SPLIT = [
    BackwardSplit(width=64, warps=4, occupancy=1, latency=latency, rows=4, strip=16, slab=4)
    for latency in (1, 2)
]


def tiles_of(bucket):
    return TILES if bucket.op == "forward" else BACKWARD_TILES


@pytest.mark.parametrize("size", SIZES)
def test_a_search_passes_on_what_its_size_class_may_lose(finder, monkeypatch, size):
    asked = []

    def choose(variants, measure, why_wrong, tell, others_of, most_loss):
        asked.append(most_loss)
        return variants[0], {variants[0]: (1.0,) * len(search.rows_of(bucket))}

    bucket = Bucket("forward", 64, "float32", size)
    monkeypatch.setattr(search, "choose", choose)
    finder.tune(bucket, TILES[:1])
    assert asked == [search.MOST_LOSS[size]]


@pytest.mark.parametrize(
    ("bucket", "variants"),
    [(FORWARD, TILES), (BACKWARD, BACKWARD_TILES), (DX, BACKWARD_TILES), (FEW, SPLIT), (FEW, BACKWARD_TILES)],
)
@pytest.mark.parametrize("target", [TARGET, None])
def test_search_times_checks_and_describes(finder, bucket, variants, target):
    finder.machine.facts = finder.machine.facts._replace(target=target)
    entry = finder.tune(bucket, variants)
    assert entry.is_entry and list(entry.buckets()) == [bucket] and not entry.gpus
    assert entry.variant(64) in variants and not finder.lines
    assert [timing["m"] for timing in entry.evidence] == list(search.rows_of(bucket))
    assert all(timing["us"] > 0 and timing["before"] > 0 for timing in entry.evidence)
    assert {timing.get("gpu") for timing in entry.evidence} == {target and target.gpu}
    assert tables.parse_table(tables.render_table(TARGET, [entry]), TARGET) == [entry]


def drop_a_row(results):
    """Imitate a race between blocks: one row too few in dw, or one element too few of y."""
    first, *_, dw = results[:3]  # of a forward residual_out, which is None
    if dw is not None:
        dw -= dw.abs().max() / 50
    else:
        first[3, 5] = 0
    return results


def unwritten(results):
    results[0][0, 0] = math.nan
    return results


def other_bits():
    """Right in every run, but every fourth rounds one element otherwise."""
    calls = itertools.count(1)

    def spoil(results):
        if next(calls) % 4 == 0:
            first = results[0]
            first[0, 0] = torch.nextafter(first[0, 0], torch.tensor(math.inf, dtype=first.dtype))
        return results

    return spoil


@pytest.mark.parametrize("bucket", [FORWARD, BACKWARD, DX])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(drop_a_row, "relative error"), (unwritten, "relative error of nan"), (other_bits(), "other bits")],
)
def test_a_fast_variant_that_is_wrong_is_rejected(finder, monkeypatch, bucket, spoil, reason):
    name = "Forward" if bucket is FORWARD else "Backward"
    wrong = tiles_of(bucket)[2]

    class Spoiled(Launcher):
        def __call__(self, *arguments):
            results = super().__call__(*arguments)
            return spoil(results) if self.plan.first == wrong else results

    set_launcher(monkeypatch, name, Spoiled)
    real = finder.times_at

    def times_at(m, bucket, variants, seconds):
        return real(m, bucket, variants, seconds) | {wrong: 1e-3}

    monkeypatch.setattr(finder, "times_at", times_at)
    entry = finder.tune(bucket, tiles_of(bucket))
    assert entry.variant(64) in tiles_of(bucket)[:2]
    [line] = finder.lines
    assert line.startswith(f"rejected {wrong}") and reason in line


def test_every_set_has_a_weight_and_rstd_of_its_own(finder, monkeypatch):
    """One for all would be in L2 after the first call of a graph; a layer's is not."""
    monkeypatch.setattr(search, "sets_needed", lambda *_: 3)
    monkeypatch.setattr(search, "calls_needed", lambda *_: 6)
    for form in FORMS:
        met = []
        monkeypatch.setattr(calls, "runner", lambda *_, met=met: met.append)
        finder.times_at(48, BACKWARD._replace(form=form), BACKWARD_TILES[:1], 0.0)
        assert len(met) >= 6
        has = form_named(form)
        assert [each is not None for each in met[0][4:6]] == [has.residual, has.bias]
        assert all((inputs.alpha != 1.0) == has.d_residual for inputs in met), "else dx is d_residual"
        for arrays in zip(*(inputs[:6] for inputs in met), strict=True):
            if arrays[0] is not None:
                places = [each.data_ptr() for each in arrays]
                assert len(set(places)) == 3 and places[:3] == places[3:6]


@pytest.mark.parametrize("weight", problem.WEIGHTS)
def test_variants_are_timed_and_checked_beside_the_weight_of_their_bucket(finder, monkeypatch, weight):
    bucket, met = Bucket("forward", 64, "bfloat16", "small", weight), set()

    class Spied(Launcher):
        def __call__(self, spec, tensors):
            met.add(tensors[1].dtype)
            return super().__call__(spec, tensors)

    set_launcher(monkeypatch, "Forward", Spied)
    finder.times_at(48, bucket, TILES[:1], 0.0)
    assert met == {torch.bfloat16 if weight == problem.SAME else torch.float32}
    met.clear()
    assert finder.why_wrong(bucket, TILES[0]) is None
    assert met == ({torch.bfloat16, torch.float32} if weight == problem.SAME else {torch.float32})


@pytest.mark.parametrize("is_odd", [False, True])
def test_every_m_and_an_odd_one_are_checked(finder, monkeypatch, is_odd):
    """A kernel is compiled apart for multiples of 16; each may be the wrong one."""
    smallest = min(search.rows_of(BACKWARD)) if not is_odd else max(search.rows_of(BACKWARD)) - 3

    class WrongThere(Launcher):
        def __call__(self, spec, tensors, wanted):
            dx, d_residual, dw, db = super().__call__(spec, tensors, wanted)
            if tensors[0].shape[0] == smallest:
                dw *= 1.01
            return dx, d_residual, dw, db

    assert finder.why_wrong(BACKWARD, BACKWARD_TILES[0]) is None
    set_launcher(monkeypatch, "Backward", WrongThere)
    assert finder.why_wrong(BACKWARD, BACKWARD_TILES[0]).startswith(
        f"{smallest} x 64: dw has a relative error"
    )


def test_what_a_kernel_fails_to_write_is_seen(finder, monkeypatch):
    class Lazy(Launcher):
        def __call__(self, spec, tensors):
            y, *others = super().__call__(spec, tensors)
            if self.plan.first == TILES[0]:
                fresh = self.machine.empty(y.shape, y.dtype)
                fresh[:-1] = y[:-1]
                return fresh, *others
            return y, *others

    set_launcher(monkeypatch, "Forward", Lazy)
    assert "relative error of nan" in finder.why_wrong(FORWARD, TILES[0])
    assert finder.why_wrong(FORWARD, TILES[1]) is None


def test_calls_that_follow_one_another_are_checked_too(finder, monkeypatch):
    """Filling memory with NaN keeps a call's first kernel from starting while the call before still runs."""

    class Racing(Launcher):
        def __call__(self, spec, tensors, wanted):
            dx, d_residual, dw, db = super().__call__(spec, tensors, wanted)
            if not isinstance(self.machine, search.Poisoned) and tensors[0].shape[0] % 2:
                dw[-1] += 1
            return dx, d_residual, dw, db

    set_launcher(monkeypatch, "Backward", Racing)
    assert finder.why_wrong(BACKWARD, BACKWARD_TILES[0]).endswith(
        "calls that follow one another has other bits"
    )


def test_a_variant_whose_launch_raises_is_left_out(finder, monkeypatch):
    class Failing(Launcher):
        def __init__(self, description, machine, plan):
            if plan.first == TILES[1]:
                raise RuntimeError("no room in shared memory")
            super().__init__(description, machine, plan)

    set_launcher(monkeypatch, "Forward", Failing)
    assert finder.tune(FORWARD, TILES).variant(64) != TILES[1]
    assert "does not run" in finder.lines[0] and "no room in shared memory" in finder.lines[0]


VARIANTS = [BackwardRows(width=4096, warps=8, occupancy=1, latency=latency) for latency in range(1, 11)]


def halved(variant: BackwardRows) -> BackwardRows:
    return dataclasses.replace(variant, grid_percent=50)


def choose(microseconds: dict[BackwardRows, tuple[float, ...]], wrong=(), told=None, **more):
    """Call `search.choose` on variants with these true times; the short first round sees them distorted."""
    asked = []

    def measure(variants, seconds):
        asked.append(variants)
        noise = 1.0 if seconds else 1.02
        return {
            variant: tuple(us * (noise if i % 2 else 1) for us in microseconds[variant])
            for i, variant in enumerate(variants)
            if variant in microseconds
        }

    def why_wrong(variant):
        return "dw has an error" if variant in wrong else None

    result = search.choose(VARIANTS, measure, why_wrong, (told if told is not None else []).append, **more)
    assert asked[0] == VARIANTS, "every candidate is timed"
    return result


@given(st.permutations(range(10)), st.sets(st.integers(0, 9), max_size=9))
def test_the_fastest_that_is_right_wins(order, wrong):
    microseconds = {variant: (10 * 1.1**place, 7.0) for variant, place in zip(VARIANTS, order, strict=True)}
    told = []
    # A loss above the distortion: none of these looks like a loser, so no place is kept for slower ones.
    variant, times = choose(microseconds, {VARIANTS[i] for i in wrong}, told, most_loss=1.03)
    right = [i for i in sorted(range(10), key=order.__getitem__) if i not in wrong]
    best = right[0] if order[right[0]] < search.FINALISTS or 0 in wrong else 0
    assert VARIANTS.index(variant) == best, "the rules serve where none of the fastest is right"
    assert times[variant] and len(told) <= len(wrong)
    assert all("rejected backward_rows width=4096 " in line and "dw has an error" in line for line in told)


def test_others_of_the_fastest_are_timed_and_win_if_they_are_faster():
    times = {variant: (10.0 + place, 10.0) for place, variant in enumerate(VARIANTS)}
    slow = {halved(variant): (20.0, 20.0) for variant in VARIANTS}
    chosen, _ = choose(
        times | slow | {halved(VARIANTS[2]): (8.0, 8.0)}, others_of=lambda variant: [halved(variant)]
    )
    assert chosen == halved(VARIANTS[2])
    # of the fourth fastest no other is tried
    chosen, _ = choose(
        times | slow | {halved(VARIANTS[3]): (8.0, 8.0)}, others_of=lambda variant: [halved(variant)]
    )
    assert chosen == VARIANTS[0]


def test_the_rules_stay_unless_they_lose_by_more_than_the_spread():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0)) | {VARIANTS[7]: (9.95, 9.95)}
    assert choose(times)[0] == VARIANTS[0]
    assert choose(times | {VARIANTS[7]: (9.5, 10.0)})[0] == VARIANTS[7]


def test_nobody_loses_to_the_rules():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0)) | {VARIANTS[7]: (5.0, 10.05)}
    assert choose(times)[0] == VARIANTS[7]
    times[VARIANTS[7]] = (5.0, 10.2)
    assert choose(times)[0] == VARIANTS[0]
    times[VARIANTS[4]] = (9.0, 9.9)
    assert choose(times)[0] == VARIANTS[4]
    fast = {variant: (5.0, 10.2) for variant in VARIANTS[1:-1]}  # more than there are finalists
    assert choose(times | fast | {VARIANTS[-1]: (9.0, 9.9)})[0] == VARIANTS[-1]
    assert choose(times, wrong=(VARIANTS[0], VARIANTS[4]))[0] not in (VARIANTS[0], VARIANTS[4], VARIANTS[7])


def test_calls_of_few_rows_may_lose_a_little():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0, 10.0))
    times |= {VARIANTS[7]: (9.0, 10.2, 10.2), VARIANTS[8]: (8.0, 10.4, 8.0)}
    for size in ("large", "small"):
        assert choose(times, most_loss=search.MOST_LOSS[size])[0] == VARIANTS[0]
    assert choose(times, most_loss=search.MOST_LOSS["few"])[0] == VARIANTS[7]


@pytest.mark.parametrize("size", SIZES)
def test_losers_of_the_first_round_leave_room_for_others(size):
    """They look as if they stayed below the limit, or may: that round is short."""
    loss = search.MOST_LOSS[size] * 1.01
    losers = dict.fromkeys(VARIANTS[1:8], (10.0 * loss, 8.0, 8.0))
    times = dict.fromkeys(VARIANTS, (10.0, 10.0, 10.0)) | losers | {VARIANTS[8]: (9.5, 9.5, 9.5)}
    assert choose(times, most_loss=search.MOST_LOSS[size])[0] == VARIANTS[8]


def test_a_wrong_winner_makes_no_loser_to_the_rules_win():
    losers = dict.fromkeys(VARIANTS[2:6], (5.0, 10.3))
    times = (
        dict.fromkeys(VARIANTS, (20.0, 20.0)) | losers | {VARIANTS[0]: (10.0, 10.0), VARIANTS[1]: (4.0, 9.5)}
    )
    assert choose(times)[0] == VARIANTS[1]
    assert choose(times, wrong=[VARIANTS[1]])[0] == VARIANTS[0]


def test_a_variant_that_does_not_run_is_no_candidate():
    times = {variant: (10.0,) for variant in VARIANTS[3:]} | {VARIANTS[5]: (5.0,)}
    assert choose(times)[0] == VARIANTS[5]
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose({})
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose(times, wrong=VARIANTS)


OTHERS = tuple(form for form in FORMS if form != PLAIN_ROWS)
EACH = [Bucket(op, 64, "bfloat16", "small", form=form) for form in FORMS for op in OPS]
CALLS = [(each.op, each.form) for each in EACH if each.has_calls]
OF_OTHERS = [(op, form) for op, form in CALLS if form != PLAIN_ROWS]
FACTS = Device(90, 132, 16)


def bucket_of(op: str, form: str, dtype: str = "bfloat16") -> Bucket:
    return Bucket(op, 64, dtype, "small", form=form)


# Candidates


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
@pytest.mark.parametrize("n", [64, 1000, 1024, 4096, 5120, 8192, 8201, 12288, 20480, 28672])
def test_every_candidate_takes_the_form(n, form, op):
    for dtype, size in itertools.product(("bfloat16", "float32"), SIZES):
        bucket = Bucket(op, n, dtype, size, form=form)
        asked = bucket.problem(FACTS)
        if not rows_of_class(size, n) or not rules.is_fused(asked):
            continue
        found = candidates(bucket, 90)
        assert found[0] == by_rules(bucket, 90) and len(found) > 8
        assert all(each.serves_form(asked) and not each.heads for each in found)
        assert all(fits_registers(each, op, ITEMSIZE[dtype], form=asked.form) for each in found[1:])


@pytest.mark.parametrize(
    ("op", "n", "form"),
    [
        ("forward", 20480, BIAS),
        ("dx", 8201, RESIDUAL),
        ("backward", 16392, RESIDUAL),
        ("backward", 14336, D_RESIDUAL),
    ],
)
def test_every_candidate_serves_once_it_is_an_entry(op, n, form):
    """Tuning timed and checked it, whatever the rules choose."""
    bucket = Bucket(op, n, "bfloat16", "large", form=form)
    for variant in candidates(bucket, 90):
        entries = (Records((entry_of(bucket, variant),)),)
        of_entry = planning.rules_of()._replace(entries=entries)
        assert chosen_by(bucket.problem(FACTS), of_entry).first == variant


@pytest.mark.parametrize("form", OTHERS)
def test_a_form_takes_registers(form):
    has, op = form_named(form), "backward"
    tight = variants.BackwardRows(width=16384, warps=8, occupancy=1, latency=4)
    assert fits_registers(tight, op, 4) and not fits_registers(tight, op, 4, form=has)
    if form == RESIDUAL:
        loads = variants.ForwardRows(width=16384, warps=8, occupancy=4, latency=4, packed=True)
        assert fits_registers(loads, "forward", 2) and not fits_registers(loads, "forward", 2, form=has)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_sum_of_db_takes_the_registers_of_a_sum_of_dw(itemsize):
    """The widest row that fits keeps one float32 more an element, whatever the bytes of x and dy."""

    def most_elements(form):
        sizes = range(1024, 32769, 1024)
        kinds = {
            n: variants.BackwardRows(width=1024, pieces=n // 1024, warps=8, occupancy=1, latency=4)
            for n in sizes
        }
        return max(n for n, each in kinds.items() if fits_registers(each, "backward", itemsize, form=form))

    kept = 2 + itemsize / 2
    expected = most_elements(form_named(PLAIN_ROWS)) * kept / (kept + 1)
    assert abs(most_elements(form_named(BIAS)) - expected) <= 1024


@pytest.mark.parametrize("form", OTHERS)
def test_rows_by_tma_are_tried_with_every_form(form):
    bucket = Bucket("backward", 4096, "bfloat16", "large", form=form)
    assert any(isinstance(each, variants.BackwardPipelined) for each in candidates(bucket, 90))


@pytest.mark.parametrize("form", OTHERS)
def test_what_serves_plain_rows_is_tried_where_it_takes_the_form(form):
    bucket = Bucket("backward", 4096, "bfloat16", "large", form=form)
    known = [
        variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=9, tma=True),
        variants.BackwardPipelined(width=1024, warps=4, occupancy=2, latency=4, pieces=4, grid_percent=92),
    ]
    found = candidates(bucket, 90, most=5, known=known)
    split = variants.BackwardSplit(width=4096, warps=8, occupancy=1, latency=1, rows=8, strip=256, slab=64)
    assert found[1:3] == known and split not in candidates(bucket, 90, most=5, known=[split])


# What is run


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_search_times_checks_and_describes(finder, form, op, dtype):
    bucket = bucket_of(op, form, dtype)
    finder.machine.facts = finder.machine.facts._replace(target=TARGET)
    entry = finder.tune(bucket, tiles_of(bucket))
    assert list(entry.buckets()) == [bucket] and entry.variant(64) in tiles_of(bucket) and not finder.lines
    assert all(timing["us"] > 0 for timing in entry.evidence)
    assert tables.parse_table(tables.render_table(TARGET, [entry]), TARGET) == [entry]


RESULTS = {
    ("forward", "residual"): [{"y", "rstd", "residual_out"}] * 2,
    ("backward", "residual"): [{"dx", "dw"}] * 2,
    ("dx", "residual"): [{"dx"}] * 2,
    ("backward", "d_residual"): [{"dx", "d_residual", "dw"}] * 2,
    ("dx", "d_residual"): [{"dx", "d_residual"}] * 2,
    ("forward", "bias"): [{"y", "rstd"}] * 2,
    ("backward", "bias"): [{"dx", "dw", "db"}] * 2,
}


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
def test_each_result_that_is_wrong_is_refused(finder, op, form):
    """One element of one row, by more than a rounding. Of every other seed a forward's residual has an alpha."""
    bucket = bucket_of(op, form)
    run = calls.runner(finder.machine, bucket, tiles_of(bucket)[0])
    for seed, names in enumerate(RESULTS[op, form]):
        inputs = calls.checked_inputs(37, bucket, torch.device("cpu"), seed)
        outputs = run(inputs)
        assert set(outputs) == names and calls.why_wrong(inputs, outputs) is None
        for name in names:
            spoilt = outputs | {name: outputs[name].clone()}
            spoilt[name].view(-1)[11] *= 1.03125
            assert calls.why_wrong(inputs, spoilt).startswith(name), (name, seed)


MOVED = {  # rows that a call reads, and writes
    ("forward", "plain"): (1, 1),
    ("forward", "residual"): (2, 2),
    ("forward", "bias"): (1, 1),
    ("backward", "plain"): (2, 1),
    ("backward", "residual"): (3, 1),
    ("backward", "d_residual"): (3, 2),
    ("backward", "bias"): (2, 1),
    ("dx", "plain"): (2, 1),
    ("dx", "residual"): (3, 1),
    ("dx", "d_residual"): (3, 2),
}


@pytest.mark.parametrize(("op", "form"), CALLS)
def test_what_is_timed_moves_so_many_rows(finder, op, form):
    bucket = bucket_of(op, form)
    [inputs] = calls.timed_inputs(16, bucket, 1, torch.device("cpu"))
    outputs = calls.runner(finder.machine, bucket, tiles_of(bucket)[0])(inputs)
    read = [each for each in (inputs.x, inputs.residual, *([] if op == "forward" else [inputs.dy]))]
    read, written = (
        [each for each in some if each is not None and each.ndim == 2] for some in (read, outputs.values())
    )
    assert calls.rows_moved(bucket) == (len(read), len(written)) == MOVED[op, form]


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
def test_what_runs_is_what_users_calls_of_the_form_run(finder, monkeypatch, op, form):
    """Timed or checked, a call is one for which the launch code would look for an entry of its bucket."""
    bucket, met, device = bucket_of(op, form), [], torch.device("cpu")
    run = calls.runner(finder.machine, bucket, tiles_of(bucket)[0])
    [launcher] = run.args
    bind = launcher.bind
    monkeypatch.setattr(launcher, "bind", lambda *asked: (met.append(asked), bind(*asked))[1])
    for inputs in (
        *calls.timed_inputs(16, bucket, 1, device),
        *(calls.checked_inputs(16, bucket, device, seed) for seed in (0, 1)),
    ):
        run(inputs)
        problem = find(launcher.description, finder.machine, *met[-1]).plan.problem
        assert problem.form == form_named(form) and problem.op == op
        assert problem.bucket._replace(weight=bucket.weight) == bucket._replace(size=problem.size)
    assert len(met) == 3


@pytest.mark.parametrize(
    ("op", "form"), [("forward", "residual"), ("backward", "residual"), ("backward", "d_residual")]
)
def test_a_residual_that_is_left_out_is_refused(finder, monkeypatch, op, form):
    """A kernel that takes no residual would do so."""
    name = "Forward" if op == "forward" else "Backward"

    class Forgetful(Launcher):
        def __call__(self, spec, tensors, *wanted):
            *others, last = tensors  # residual, or d_residual_out
            return super().__call__(spec, (*others, torch.zeros_like(last)), *wanted)

    set_launcher(monkeypatch, name, Forgetful)
    bucket = bucket_of(op, form)
    reason = finder.why_wrong(bucket, tiles_of(bucket)[0])
    assert "residual_out has other bits" in reason if op == "forward" else "dx has a relative error" in reason


def test_an_alpha_that_is_left_out_is_refused(finder, monkeypatch):
    class Forgetful(Launcher):
        def __call__(self, spec, tensors, wanted):
            return super().__call__(spec._replace(alpha=1.0), tensors, wanted)

    bucket = bucket_of("backward", D_RESIDUAL)
    assert finder.why_wrong(bucket, BACKWARD_TILES[0]) is None
    set_launcher(monkeypatch, "Backward", Forgetful)
    assert "dx has a relative error" in finder.why_wrong(bucket, BACKWARD_TILES[0])


# What they should come to


@pytest.mark.parametrize("chunk", [64 * 16, 2**25])
def test_the_check_of_sums_and_residuals_is_that_of_autograd(monkeypatch, chunk):
    """PyTorch's own derivatives in float64 are within every allowance, by far."""
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", chunk)
    inputs: Inputs = make_inputs(100, 64, torch.float32, torch.float32, device="cpu")
    x, dy, weight, eps = (each if isinstance(each, float) else each.double() for each in inputs[:4])
    bias, d_out = torch.randn(64, dtype=torch.float64), torch.randn(100, 64, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = torch.nn.functional.rms_norm(leaves[0], (64,), leaves[1], eps) + leaves[2]
    ((y * dy).sum() + (leaves[0] * d_out).sum()).backward()
    d = leaves[0].grad
    outputs = {"y": y.detach(), "dx": 0.5 * d, "d_residual": d, "dw": leaves[1].grad, "db": leaves[2].grad}
    given = {"bias": bias, "d_residual_out": d_out, "alpha": 0.5}
    errors, allowed = accuracy.errors_of({"it": outputs}, x, dy, weight, eps, **given)
    assert set(errors["it"]) == set(outputs) and max(errors["it"].values()) < 1e-12
    assert accuracy.why_wrong(errors["it"], allowed) is None
    for name in ("bias", "d_residual_out", "alpha"):
        without = {key: value for key, value in given.items() if key != name}
        errors, allowed = accuracy.errors_of({"it": outputs}, x, dy, weight, eps, **without)
        assert accuracy.why_wrong(errors["it"], allowed) is not None, name
