# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""warmup_rope: after it no call of qk_norm_rope or rms_norm_rope compiles anything, whatever its B, T and layouts."""

import itertools
import random

import pytest
import torch
from helpers import DEVICE
from torch import Tensor

import tilegym_rmsnorm as tr

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from counting import META, Case, CountingMachine, counted_calls  # noqa: E402

from tilegym_rmsnorm.backends import cutile, refusals  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import warm as warm_module  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import warm_rope  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


PLAIN = Case((128, BF16), {"heads": 32, "k_heads": 8})
CASES = {
    "plain": PLAIN,
    "one tensor": Case((128, BF16), {"heads": 32}),
    "one head": Case((64, BF16), {"heads": 1, "k_heads": 1}),
    "4 heads and 1": Case((128, BF16), {"heads": 4, "k_heads": 1}),
    "6 heads and 1": Case((128, BF16), {"heads": 6, "k_heads": 1}),
    "31 heads and 1": Case((128, BF16), {"heads": 31, "k_heads": 1}),
    "31 heads and 1, weights of heads": Case((64, BF16), {"heads": 31, "k_heads": 1, "per_head": True}),
    "more heads of k": Case((96, BF16), {"heads": 2, "k_heads": 6}),
    "weights of heads": Case((128, BF16), {"heads": 32, "k_heads": 8, "per_head": True}),
    "no weights": Case((128, BF16, None), {"heads": 40, "k_heads": 8}),
    "float32": Case((80, FP32), {"heads": 28, "k_heads": 4}),
    "wide, a part": Case(
        (256, BF16, FP32), {"heads": 16, "k_heads": 2, "rotary_dim": 64, "rope_rounding": "norm"}
    ),
    "interleaved": Case((128, FP16), {"heads": 16, "k_heads": 16, "interleaved": True, "half_tables": True}),
    "half tables": Case((64, BF16), {"heads": 5, "k_heads": 5, "half_tables": True, "table_dtype": BF16}),
    "positions": Case((128, BF16), {"heads": 28, "k_heads": 4, "positions": 4096}),
    "positions of 32 bits": Case(
        (128, BF16), {"heads": 28, "k_heads": 4, "positions": 4096, "position_dtype": torch.int32}
    ),
    "odd positions": Case((64, BF16), {"heads": 3, "positions": 1001, "rope_rounding": "each"}),
    "llama": Case((128, BF16), {"heads": 64, "k_heads": 8, "casting": "llama", "rope_rounding": "each"}),
    "16 heads and 1, llama": Case((128, BF16), {"heads": 16, "k_heads": 1, "casting": "llama"}),
    "composed": Case((576, BF16), {"heads": 3, "k_heads": 1}),
}
LAYOUTS = ("contiguous", "projection", "gate")


def warmed(machine: CountingMachine, case: Case) -> set:
    machine.kernels.clear()
    tr.warmup_rope(case.width, **case.options, device="cuda:0")
    return set(machine.kernels)


def step(
    case: Case,
    b: int,
    t: int,
    layout: str = "contiguous",
    of_batch: bool = False,
    device: torch.device = META,
) -> None:
    """The forward and the backward of a call that the case describes. layout: of q and k; beside contiguous ones
    gradients are contiguous, else as attention leaves them. of_batch: whether each batch has rows of cos and sin, or
    positions, of its own."""
    (n, dtype, *weight_dtype), options = case
    counts = [options[name] for name in ("heads", "k_heads") if name in options]
    heads = [each.requires_grad_() for each in _heads(b, t, counts, n, dtype, layout, device)]
    weights = [
        _weight((count, n) if options.get("per_head") else (n,), *(weight_dtype or [dtype]), device)
        for count in counts
    ]
    names = "rotary_dim", "interleaved", "casting", "rope_rounding"
    given = {name: options[name] for name in names if name in options}
    if "positions" in options:
        size = (b, t) if of_batch else (t,)
        dtype = options.get("position_dtype", torch.int64)
        given["position_ids"] = torch.zeros(size, dtype=dtype, device=device)
    tables = _tables(case, b, t, of_batch, device)
    if len(heads) == 2:
        results = tr.qk_norm_rope(*heads, *weights, *tables, **given, backend="cutile")
    else:
        results = (tr.rms_norm_rope(*heads, *weights, *tables, **given, backend="cutile"),)
    torch.autograd.backward(results, [_gradient(each, layout) for each in results])


def _heads(
    b: int, t: int, counts: list[int], n: int, dtype: torch.dtype, layout: str, device: torch.device
) -> list[Tensor]:
    if layout == "projection":  # of q, k and v
        packed = torch.zeros(b, t, sum(counts) + counts[-1], n, dtype=dtype, device=device)
        return list(packed.split([*counts, counts[-1]], dim=2)[: len(counts)])
    q, *k = (torch.zeros(b, t, count, n, dtype=dtype, device=device) for count in counts)
    return [q.repeat(1, 1, 1, 2)[..., :n] if layout == "gate" else q, *k]


def _weight(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> Tensor | None:
    return None if dtype is None else torch.ones(shape, dtype=dtype, device=device, requires_grad=True)


def _tables(case: Case, b: int, t: int, of_batch: bool, device: torch.device) -> tuple[Tensor, ...]:
    """cos and sin: halves of one cache, or the first rows of longer tables."""
    (n, *_), options = case
    columns, dtype = options.get("rotary_dim", n), options.get("table_dtype", FP32)
    rows = (options["positions"],) if "positions" in options else (b, t) if of_batch else (t + 5,)
    if options.get("half_tables"):
        both = torch.zeros(*rows, columns, dtype=dtype, device=device).chunk(2, -1)
    else:
        both = (torch.zeros(*rows, columns, dtype=dtype, device=device) for _ in range(2))
    is_long = len(rows) == 1 and "positions" not in options
    return tuple(each[:t] if is_long else each for each in both)


def _gradient(result: Tensor, layout: str) -> Tensor:
    dy = torch.zeros_like(result)
    return dy if layout == "contiguous" else dy.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", CASES)
def test_no_batch_compiles_after_it(on_meta, name):
    case, chance = CASES[name], random.Random(name)
    kernels = warmed(on_meta, case)
    assert {each for each, *_ in kernels} >= {"sum_partials"} or case.width[2:] == (None,)
    sizes = {(b, t) for b in (1, 2, 3, 4, 8, 16, 33, 48) for t in (1, 2, 5, 8, 16, 17, 24, 100, 4096)}
    sizes |= {tuple(int(2 ** chance.uniform(0, top)) for top in (7, 12)) for _ in range(100)}
    for b, t in sorted(sizes):
        layout, of_batch = chance.choice(LAYOUTS), chance.random() < 0.5
        step(case, b, t, layout, of_batch)
        assert on_meta.kernels == kernels, f"{b, t, layout, of_batch}: {on_meta.kernels - kernels}"


@pytest.mark.parametrize("level", ["batch", "device"])
@pytest.mark.parametrize(
    "name", ["plain", "31 heads and 1, weights of heads", "half tables", "positions", "composed"]
)
def test_no_batch_compiles_after_it_under_a_level(on_meta, name, level):
    case, chance = CASES[name], random.Random(name)
    with tr.reproducible(level):
        kernels = warmed(on_meta, case)
        for b, t in itertools.product((1, 2, 3, 16, 33), (1, 2, 5, 16, 17, 100, 4096)):
            layout, of_batch = chance.choice(LAYOUTS), chance.random() < 0.5
            step(case, b, t, layout, of_batch)
            assert on_meta.kernels == kernels, f"{b, t, layout, of_batch}: {on_meta.kernels - kernels}"


@pytest.mark.parametrize(
    "name",
    ["plain", "4 heads and 1", "6 heads and 1", "31 heads and 1, weights of heads", "16 heads and 1, llama"],
)
@pytest.mark.parametrize("sm_count", [66, 132, 188])
def test_every_kind_of_arrays_of_small_batches(monkeypatch, name, sm_count):
    """P of q and of k follow B and T together, and no random call may meet a pair of kinds that few calls have."""
    with counted_calls(monkeypatch, sm_count):
        calls = _calls_of(monkeypatch, CASES[name])
        launchers = calls.launchers(META)

        def kinds(lead: warm_rope.RopeLead) -> tuple:
            return warm_rope.kinds_of_rope(calls, launchers[lead.t > 1], lead)

        found = {kinds(lead) for lead in calls.leads(META)}
        sizes = itertools.product((*range(1, 70), 500), (*range(1, 70), 264, 2507, 4096), (False, True))
        assert {kinds(warm_rope.RopeLead(*each)) for each in sizes} <= found


def _calls_of(monkeypatch: pytest.MonkeyPatch, case: Case) -> warm_rope.RopeCalls:
    seen = []
    monkeypatch.setattr(warm_module, "warm", lambda device, calls: seen.append(calls))
    tr.warmup_rope(case.width, **case.options, device="cuda:0")
    return seen[0]


def test_sms_left_free(on_meta):
    with tr.use_sm_margin(13):
        kernels = warmed(on_meta, PLAIN)
        for b, t in itertools.product((1, 2, 16, 40), (1, 7, 40, 64, 1000, 4096)):
            step(PLAIN, b, t)
            assert on_meta.kernels == kernels, f"{b, t}: {on_meta.kernels - kernels}"


@pytest.mark.parametrize(
    "name", ["plain", "weights of heads", "one tensor", "positions", "positions of 32 bits"]
)
def test_nothing_is_compiled_that_no_call_needs(on_meta, monkeypatch, name):
    case = CASES[name]
    kernels = warmed(on_meta, case)
    on_meta.kernels.clear()
    for lead in _calls_of(monkeypatch, case).leads(META):
        step(case, lead.b, lead.t, "projection", lead.has_rows_of_batch)
    assert on_meta.kernels == kernels


OTHERS = (
    {"k_heads": None},
    {"per_head": True},
    {"rotary_dim": 64},
    {"interleaved": True},
    {"table_dtype": BF16},
    {"half_tables": True},
    {"positions": 4096},
    {"positions": 4096, "position_dtype": torch.int32},
    {"casting": "llama"},
    {"rope_rounding": "norm"},
    {"rope_rounding": "each"},
)


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_other_calls_are_others(on_meta, others):
    """Each argument matters: nothing is compiled that is not asked for."""
    plain = warmed(on_meta, PLAIN)
    assert not warmed(on_meta, Case(PLAIN.width, PLAIN.options | others)) <= plain


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"width": [64, BF16]}, TypeError, r"width: expected \(n, dtype\) or"),
        ({"width": (64, torch.float64)}, TypeError, "width: expected dtypes that there are kernels for"),
        (
            {"width": (65, BF16)},
            ValueError,
            "rotary_dim: expected an even number of elements, since D, 65, is odd",
        ),
        ({"heads": 0}, ValueError, "heads: expected at least 1, got 0"),
        ({"k_heads": 1.5}, TypeError, "k_heads: expected an int or None, got 1.5"),
        ({"per_head": 1}, TypeError, "per_head: expected a bool, got 1"),
        ({"rotary_dim": 63}, ValueError, "rotary_dim: expected an even number up to D, 64, got 63"),
        ({"rotary_dim": "64"}, TypeError, "rotary_dim: expected an int or None, got '64'"),
        ({"interleaved": 1}, TypeError, "interleaved: expected a bool, got 1"),
        ({"table_dtype": FP16}, TypeError, "cos: expected torch.float32 or the dtype of q, "),
        ({"table_dtype": "float32"}, TypeError, "table_dtype: expected None or a dtype of "),
        ({"half_tables": "no"}, TypeError, "half_tables: expected a bool, got 'no'"),
        ({"positions": 0}, ValueError, "positions: expected at least 1, or None, got 0"),
        (
            {"positions": 8, "position_dtype": torch.int16},
            TypeError,
            "position_dtype: expected torch.int64 or torch.int32, got torch.int16",
        ),
        ({"casting": "twice"}, ValueError, "casting: expected one of "),
        ({"rope_rounding": "all"}, ValueError, "rope_rounding: expected one of 'end', 'norm', 'each'"),
        ({"device": "cpu"}, ValueError, "device: expected a CUDA device, got cpu"),
    ],
)
def test_what_is_no_call_is_refused(monkeypatch, changes, error, message):
    monkeypatch.setattr(warm_module, "warm", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(cutile, "unusable", refusals.tensors_unusable)
    given = {"width": (64, BF16), "heads": 4, "k_heads": 4, "device": "cuda:0"} | changes
    with pytest.raises(error, match=message):
        tr.warmup_rope(**given)


def test_what_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(cutile, "unusable", lambda request: refusals.Unusable("it rests", "wake it"))
    with pytest.raises(tr.BackendUnavailableError, match="warmup_rope: it rests. To mend it: wake it"):
        tr.warmup_rope((64, BF16), heads=4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["plain", "one tensor", "weights of heads", "interleaved", "positions", "positions of 32 bits"]
)
def test_no_call_compiles_after_it_on_a_gpu(name, compilations):
    """Neither anew nor from the disk cache."""
    case = CASES[name]
    tr.warmup_rope(case.width, **case.options)
    assert len(compilations) >= 20
    compilations.clear()
    sizes = itertools.product((1, 3, 16, 40), (1, 2, 7, 16, 64, 100, 2048), LAYOUTS, (False, True))
    for b, t, layout, of_batch in sizes:
        step(case, b, t, layout, of_batch, DEVICE)
        assert not compilations, f"{b, t, layout, of_batch}: {compilations}"
