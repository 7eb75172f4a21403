# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cuTile kernels, run as Python by the interpreter: every variant that the selector can pick, on every plan."""

import functools

import helpers
import plain_calls
import pytest
import torch
from cutile_runs import ShuffledMachine, plan_for, run_backward, run_forward
from helpers import BF16, FP16, FP32, assert_llama_rounds, assert_within, expected_results, make_inputs
from planning import by_rules
from sweeps import shipped_entries

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward
from tilegym_rmsnorm.backends.cutile.plans import plan, variants
from tilegym_rmsnorm.backends.cutile.plans import variant as variant_module
from tilegym_rmsnorm.backends.cutile.plans.rules import WIDEST_BACKWARD_ROW
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

CPU = torch.device("cpu")
HINTS = {"warps": 4, "occupancy": 1, "latency": 1}


# Beyond 32768: chunks, teams. Without --every-config beyond 4096 rows of each alignment, and those that end within a
# vector.
REMAINDERS = range(16) if helpers.every_config else (0, 1, 2, 4, 5, 8, 15)
WIDTHS = [n for n in range(1, 33100) if n <= 4096 or n % 16 in REMAINDERS]


@functools.cache
def rule(op: str, n: int, dtype: torch.dtype = BF16, size: str = "large") -> Variant:
    return by_rules(op, n, dtype, size).first


def one_width_per_variant(op: str, size: str) -> list[int]:
    """Return a width for each variant of 16-bit rows, odd where it serves one: lanes past the row can go wrong."""
    widths = {}
    for n in WIDTHS:
        variant = rule(op, n, size=size)
        if n % 2 or variant not in widths:
            widths[variant] = n
    return sorted(widths.values())


def forward_variants(dtype: torch.dtype, widest: int = 65536) -> list[tuple[Variant, int]]:
    """Pair variants of all sizes with the widest row whose last tile is cut off, or else the first."""
    widths = {}
    for n in (*(n for n in WIDTHS if n <= widest), widest):
        for variant in (rule("forward", n, dtype), rule("forward", n, dtype, "few")):
            if getattr(variant, "lanes", 0) > n or variant not in widths:
                widths[variant] = n
    return list(widths.items())


# A weight of x's dtype is loaded jointly with x, one of another dtype is not.
@pytest.mark.parametrize(
    ("variant", "n", "weight"),
    [(*each, BF16) for each in forward_variants(BF16)]
    + [(*each, FP32) for each in forward_variants(BF16, 4096)]
    + [(rule("forward", n, size="few"), n, FP32) for n in (7152, 18416, 24560)],
)
def test_forward_of_every_variant(variant, n, weight):
    inputs = make_inputs(5, n, BF16, weight, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs, variant))


@pytest.mark.parametrize(
    ("variant", "n"),
    [
        *forward_variants(FP32, 4096),
        *(
            (rule("forward", n, FP32, "few"), n)
            for n in (8188, 14320, 16368, 20464, 24560, 28656, 28672, 32752, 32784)
        ),
    ],
)
def test_forward_of_float32(variant, n):
    inputs = make_inputs(5, n, FP32, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs, variant))


@pytest.mark.parametrize("n", one_width_per_variant("backward", "large"))
def test_backward_of_every_variant(n):
    m = rows_for(rule("backward", n))
    inputs = make_inputs(min(m, 300), n, BF16, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs))


def rows_for(variant: Variant) -> int:
    """Give some blocks a tile more, and leave one tile partial."""
    rows = getattr(variant, "rows", 1)
    return 2 * rows * 3 * variant.occupancy + rows // 2 + 1


FEW_WIDTHS = [n for n in one_width_per_variant("backward", "few") if n <= WIDEST_BACKWARD_ROW]


@pytest.mark.parametrize(
    ("m", "n"),
    [(63, n) for n in FEW_WIDTHS]
    + [(300, n) for n in FEW_WIDTHS if rule("backward", n, size="few").slab < 300],
)
def test_backward_of_every_variant_for_few_rows(m, n):
    """300 rows are a second slab for narrow rows, 63 and 300 leave a tile of rows partial."""
    inputs = make_inputs(m, n, BF16, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, size="few"))


def entries_that_ship(op: str, dtype: str) -> list:
    """One of those that differ in their weight alone. Without --every-config the narrowest of each kernel by one row or
    several, in one tile or several, packed or not, by each way to load and each number of members: what else an entry
    says is a width, or, as warps are, for the compiler."""
    entries = {(each.n, each.variant): (each.bucket, each.variant) for each in shipped_entries(op, dtype)}
    if helpers.every_config:
        return list(entries.values())
    kinds = {}
    for (n, variant), entry in sorted(entries.items(), key=lambda each: (each[0][0], str(each[0][1]))):
        settings = variant.constants(n)
        several = [settings.get(name, 0) > 1 for name in ("ROWS", "PIECES", "REST")]
        rest = {name: value for name, value in settings.items() if isinstance(value, (bool, str))}
        kind = (variant.kernel, *several, settings.get("MEMBERS"), *sorted(rest.items()))
        kinds.setdefault(kind, entry)
    return list(kinds.values())


@pytest.mark.parametrize(
    ("bucket", "variant"),
    [
        pytest.param(bucket, variant, id=f"{op}-{bucket.n}-{dtype}-{bucket.size}-{number}")
        for op in ("forward", "backward", "dx")
        for dtype in ("bfloat16", "float32")
        for number, (bucket, variant) in enumerate(entries_that_ship(op, dtype))
    ],
)
def test_entries_that_ship(bucket, variant):
    # As above, if that is not too much for a test.
    m = max(7, min(rows_for(variant), 300, 2**18 // bucket.n))
    inputs = make_inputs(m, bucket.n, getattr(torch, bucket.dtype), FP32, offset=1.0, device=CPU)
    more = {"has_dw": False} if bucket.op == "dx" else {}
    run = run_forward if bucket.op == "forward" else run_backward
    assert_within(expected_results(inputs), **run(inputs, variant, **more))


@pytest.mark.parametrize("n", [100, 1000, 3000, 5000, 12304, 17000, 18500, 33000, 49200])
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("size", ["few", "large"])
def test_other_dtypes(n, dtype, size):
    inputs = make_inputs(7, n, dtype, dtype, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs, size=size))


@pytest.mark.parametrize("n", [64, 2048, 5000, 18448, 18500, 33000, 33001])
@pytest.mark.parametrize("size", ["few", "large"])
def test_llama_casting(n, size):
    inputs = make_inputs(7, n, BF16, FP32, casting="llama", device=CPU)
    llama, once = (
        run_forward(each) | run_backward(each, size=size)
        for each in (inputs, inputs._replace(casting="once"))
    )
    assert_within(expected_results(inputs), **llama)
    assert_llama_rounds(inputs, llama, once)


@pytest.mark.parametrize("n", [64, 2048, 5000, 18500, 33000, 33008])
def test_no_weight(n):
    inputs = make_inputs(7, n, BF16, None, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 2048, 5000, 18448, 18500, 33008])
def test_frozen_weight_gives_the_same_dx(n):
    inputs = make_inputs(7, n, BF16, FP32, device=CPU)
    assert torch.equal(run_backward(inputs, has_dw=False)["dx"], run_backward(inputs)["dx"])


@pytest.mark.parametrize("n", [18448, 33001, 33008])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_dx_alone_of_wide_rows(n, dtype):
    inputs = make_inputs(5, n, dtype, FP32, offset=1.0, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, has_dw=False))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("weight_dtype", [FP32, None])
def test_rows_as_several_2d_tiles(rows, casting, weight_dtype):
    """The last tile of columns and the last tile of rows reach past x."""
    inputs = make_inputs(7 * rows + 1, 150, BF16, weight_dtype, casting=casting, offset=0.5, device=CPU)
    variant = variants.BackwardTiles(width=64, warps=4, occupancy=1, latency=2, rows=rows, pieces=3, tma=True)
    found = run_backward(inputs, variant)
    assert_within(expected_results(inputs), **found)
    if casting == "llama" and weight_dtype is not None:
        assert_llama_rounds(inputs, found, run_backward(inputs._replace(casting="once"), variant))
    assert torch.equal(run_backward(inputs, variant, has_dw=False)["dx"], found["dx"])


@pytest.mark.parametrize("m", [1, 29])
def test_rows_as_several_2d_tiles_in_any_order_and_layout(m):
    """29 rows are 8 tiles for 3 blocks. A single one leaves one partial row, which is dw and has weight's dtype."""
    inputs = make_inputs(m, 150, BF16, BF16, offset=0.5, device=CPU)
    variant = variants.BackwardTiles(width=64, warps=4, occupancy=1, latency=2, rows=4, pieces=3, tma=True)
    first = run_backward(inputs, variant, seed=1)
    assert_within(expected_results(inputs), **first)
    x, dy = (torch.full((m, 153), torch.nan, dtype=BF16) for _ in range(2))
    x[:, :150], dy[:, 3:] = inputs.x, inputs.dy
    strided = inputs._replace(x=x[:, :150], dy=dy[:, 3:])
    for again in (run_backward(inputs, variant, seed=2), run_backward(strided, variant, seed=3)):
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(("x_scale", "dy_scale"), [(1e-15, 1e3), (1e10, 1e-10), (3e-20, 1e-6), (1e21, 1e10)])
@pytest.mark.parametrize(
    "variant",
    [
        variants.BackwardRows(width=64, **HINTS),
        variants.BackwardTiles(width=64, **HINTS),
        variants.BackwardStrips(width=16, **HINTS),
        variants.BackwardSplit(width=64, rows=2, strip=16, slab=8, **HINTS),
    ],
    ids=lambda variant: variant.kernel,
)
def test_scales_far_from_one(variant, x_scale, dy_scale):
    """No kernel computes the square of rstd, 1 / x without eps: it would be 0 or infinite at the last two."""
    inputs = make_inputs(9, 50, FP32, FP32, eps=0.0, device=CPU)
    inputs = inputs._replace(x=inputs.x * x_scale, dy=inputs.dy * dy_scale)
    found = run_backward(inputs, variant)
    x, dy, weight = inputs.x.double(), inputs.dy.double(), inputs.weight.double()
    rstd = x.square().mean(dim=1, keepdim=True).rsqrt()
    c = (x * rstd * dy * weight).mean(dim=1, keepdim=True)
    for name, expected in {
        "dx": (dy * weight - x * rstd * c) * rstd,
        "dw": (dy * x * rstd).sum(dim=0),
    }.items():
        assert (found[name] - expected).abs().max() < 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("m", "n"), [(m, 64) for m in (1, 2, 127, 128, 129)] + [(m, n) for m in (1, 2, 5) for n in (4096, 18500)]
)
def test_batch_sizes_around_the_rows_of_a_tile(m, n):
    inputs = make_inputs(m, n, BF16, FP32, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs), **run_backward(inputs))


@pytest.mark.parametrize("n", [64, 3000, 18448, 18500])
@pytest.mark.parametrize("size", ["few", "large"])
def test_row_strides_are_honoured_without_a_copy(n, size):
    inputs = make_inputs(9, n, BF16, FP32, device=CPU)
    wide_x, wide_dy = (
        torch.full((9, n + 3), torch.nan, dtype=BF16),
        torch.full((2, 9, n), torch.nan, dtype=BF16),
    )
    strided = inputs._replace(x=wide_x[:, 1 : n + 1], dy=wide_dy.permute(1, 0, 2)[:, 1])
    strided.x.copy_(inputs.x)
    strided.dy.copy_(inputs.dy)
    results = run_forward(inputs) | run_backward(inputs, size=size)
    for name, value in (run_forward(strided) | run_backward(strided, size=size)).items():
        assert torch.equal(value, results[name])


@pytest.mark.parametrize("n", [64, 1000, 4096, 5000, 18448, 18500])
@pytest.mark.parametrize("size", ["few", "large"])
def test_no_bit_depends_on_the_order_of_blocks(n, size):
    inputs = make_inputs(300 if n <= 1024 else 20, n, BF16, FP32, device=CPU)
    first = run_backward(inputs, size=size, seed=1)
    for seed in (2, 3) if helpers.every_config else (2,):
        again = run_backward(inputs, size=size, seed=seed)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("n", [64, 1000, 2880, 4096, 18448])  # of multiples of 16 bytes
@pytest.mark.parametrize("size", ["few", "large"])
def test_a_row_of_y_and_dx_does_not_depend_on_the_batch(n, size):
    inputs = make_inputs(70 if n == 64 else 12, n, BF16, FP32, device=CPU)
    few = inputs._replace(x=inputs.x[7:10], dy=inputs.dy[7:10])
    assert torch.equal(run_forward(few)["y"], run_forward(inputs)["y"][7:10])
    assert torch.equal(run_backward(few, size=size)["dx"], run_backward(inputs, size=size)["dx"][7:10])


def test_more_rows_than_one_launch_takes(monkeypatch):
    """Rows past cuda-tile's limits go into further launches, whose partial rows lie behind those of the first."""
    monkeypatch.setattr(variant_module, "MOST_ROWS", 40)
    monkeypatch.setattr(variants.BackwardSplit, "most_rows", 40)
    for module in (variant_module, plan):
        monkeypatch.setattr(module, "LARGEST_GRID", 17)
    for each in (variants.BackwardTeam, variants.BackwardStrips):
        monkeypatch.setattr(each, "most_rows", 17)
    monkeypatch.setattr(interpreter, "LARGEST_GRID", (17, 2**16 - 1, 2**16 - 1))

    def check(inputs, op, most_rows, first=None, partials="shared"):
        machine = InterpretedMachine()
        assert plan_for(inputs, op, machine, first, partials=partials).most_rows == most_rows < len(inputs.x)
        if op == "forward":
            results = run_forward(inputs, first)
        else:
            results = run_backward(inputs, first, has_dw=op == "backward", partials=partials)
        assert_within(expected_results(inputs), **results)

    inputs = make_inputs(90, 64, BF16, FP32, device=CPU)
    check(inputs, "forward", 40)
    check(inputs, "backward", 40)
    check(inputs, "backward", 17, partials="own")
    wide = make_inputs(40, 33001, BF16, FP32, device=CPU)
    check(wide, "dx", 17)  # a block a row
    shared = make_inputs(40, 60, BF16, FP32, device=CPU)
    team = {"width": 16, "warps": 4, "occupancy": 1, "latency": 1, "members": 4}
    check(shared, "backward", 17, variants.BackwardTeam(**team))
    check(shared, "backward", 4, variants.BackwardTeam(**team), partials="own")
    check(shared, "forward", 4, variants.ForwardTeam(**team))
    # the mean of each row, a block a row
    check(shared, "backward", 17, variants.BackwardStrips(width=16, rows=4, **HINTS))
    check(inputs, "backward", 40, variants.BackwardSplit(width=64, rows=4, strip=16, slab=8, **HINTS))


@pytest.mark.parametrize("m", [1, 5])
def test_a_row_stride_beyond_int32_is_copied_away(m, monkeypatch):
    """A single row too: contiguous() would return it with its stride."""
    inputs = make_inputs(m, 64, BF16, FP32, device=CPU)
    far = torch.full((m, 200), torch.nan, dtype=BF16)[:, :64].copy_(inputs.x)
    monkeypatch.setattr(norm, "LARGEST_STRIDE", 199)
    machine = InterpretedMachine()
    run = Forward(machine, plan_for(inputs, "forward", machine))
    assert norm._reads_copy(run, far) and norm.packed(far).stride() == (64, 1)
    assert_within(expected_results(inputs), **run_forward(inputs._replace(x=far)))


@pytest.mark.parametrize("sm_count", [1, 2, 5, 40])
@pytest.mark.parametrize("size", ["few", "large"])
def test_the_number_of_sms_changes_no_more_than_rounding(sm_count, size):
    inputs = make_inputs(300, 1000, BF16, FP32, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, size=size, sm_count=sm_count))


def test_many_rows_get_taller_slabs_not_more_of_them():
    """One SM: at most 4 rows of dw_partial, though 70 rows in slabs of 8 would be 9."""
    inputs = make_inputs(70, 1000, BF16, FP32, device=CPU)
    variant = variants.BackwardSplit(width=1024, rows=8, strip=64, slab=8, **HINTS)
    machine = ShuffledMachine(sm_count=1)
    run = Backward(machine, plan_for(inputs, "backward", machine, variant))
    plain_calls.backward(run, inputs.x, inputs.dy, inputs.weight, torch.ones(70), 0.0)
    assert [grid[1] for grid in machine.grids[:1]] == [3] and variant.partial_rows(70, 1000, 1) == 3
    assert_within(expected_results(inputs), **run_backward(inputs, variant, sm_count=1))
