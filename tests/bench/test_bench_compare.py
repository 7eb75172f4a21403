# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""cutile against its peers: ratios, means, targets."""

from __future__ import annotations

import pytest
from bench_records import make_record, make_result

from bench.report import compare


def make_cell(ours: float | None, *peers: tuple[str, float | None], **cell):
    """The records of one cell: cutile's time and those of peers."""
    times = [("cutile", ours), *peers]
    return [make_record(us, provider=name, **cell) for name, us in times]


def test_the_best_peer_is_the_fastest_that_is_none_of_ours():
    peers = (
        ("quack", 130.0),
        ("torch.compile", 120.0),
        ("triton", 90.0),
        ("cutile[P=M]", 80.0),
        ("broken", None),
    )
    (cell,) = compare.compare(make_result(*make_cell(100.0, *peers)), "backward")
    assert (cell.peer["provider"], cell.ratio) == ("torch.compile", 1.2)


def test_cells_without_both_sides_are_left_out():
    records = make_cell(None, ("quack", 100.0)) + make_cell(100.0, ("quack", None), rows=8)
    assert compare.compare(make_result(*records), "backward") == []
    assert compare.compare(make_result(*make_cell(100.0, ("quack", 100.0))), "forward") == []


def test_the_mean_is_geometric():
    records = make_cell(100.0, ("quack", 200.0)) + make_cell(100.0, ("quack", 50.0), rows=8)
    assert compare.mean_ratio(compare.compare(make_result(*records), "backward")) == pytest.approx(1.0)
    assert compare.mean_ratio([]) is None


def test_the_table_names_the_peer_and_its_settings():
    peer = make_record(125.0, provider="quack", settings="its heuristic", gb_per_s=1600.0)
    text = compare.table(make_result(make_record(100.0), peer), "backward", "github")
    (line,) = [line for line in text.splitlines() if "4096 x 1024" in line]
    assert [each.strip() for each in line.strip("|").split("|")] == [
        *("4096 x 1024", "2000", "1600", "quack (its heuristic)", "1.25", "66%")
    ]


def verdicts(*records, **changes) -> dict[str, bool | None]:
    """Whether each target is met, by the first words that tell it from the others."""
    keys = {
        "backward: at least 1.00x": "cells",
        "backward: geometric": "mean",
        "forward: at least 1.00x": "forward",
        "backward: at least 94%": "large backward",
        "forward: at least 96%": "large forward",
        "backward of up to": "small",
        "backward's workspace": "workspace",
        "deterministic dw": "dw",
    }
    found = {}
    for target in compare.targets(make_result(*records, **changes)):
        (key,) = [name for text, name in keys.items() if target.text.startswith(text)]
        found[key] = target.is_met
    return found


def test_targets_without_cells_are_open():
    assert set(verdicts(make_record(100.0, op="both")).values()) == {None}


@pytest.mark.parametrize(
    ("peer", "cells", "mean"), [(125.0, True, True), (124.0, True, False), (99.0, False, False)]
)
def test_backward_targets(peer, cells, mean):
    met = verdicts(*make_cell(100.0, ("quack", peer), rows=1 << 16))
    assert (met["cells"], met["mean"], met["small"]) == (cells, mean, None)


def test_a_cell_that_cutile_fails_in_misses_its_target():
    good, bad = make_cell(100.0, ("quack", 200.0)), make_cell(None, ("quack", 200.0), rows=8)
    (target, *_) = compare.targets(make_result(*good, *bad))
    assert (target.cells, target.missed) == (2, ["8 x 1024 (failed)"])


def test_float32_has_no_target_of_the_mean():
    assert "mean" not in verdicts(*make_cell(100.0, ("quack", 101.0), dtype="float32"))


def test_forward_may_be_slower_within_the_spread():
    spread = {"us_p10": 99.0, "us_p90": 101.0, "op": "forward"}  # 1 % of each, so 2 %

    def met(peer: float) -> bool | None:
        return verdicts(make_record(100.0, **spread), make_record(peer, provider="quack", **spread))[
            "forward"
        ]

    assert met(98.5) and not met(97.5)


@pytest.mark.parametrize(("peer", "small"), [(143.0, True), (142.0, False)])
def test_small_calls_take_at_most_seven_tenths(peer, small):
    assert verdicts(*make_cell(100.0, ("quack", peer), rows=4096, cols=1024))["small"] is small
    assert verdicts(*make_cell(100.0, ("quack", peer), rows=4097, cols=1024))["small"] is None


@pytest.mark.parametrize(("share", "met"), [(0.94, True), (0.939, False)])
def test_large_calls_reach_a_share_of_the_copy(share, met):
    large = {"us": 100.0, "gb_per_s": 2000.0, "copy_fraction": share}  # 200 MB
    assert verdicts(make_record(**large))["large backward"] is met
    assert verdicts(make_record(**large, cols=18432))["large backward"] is None
    assert verdicts(make_record(**large | {"gb_per_s": 1999.0}))["large backward"] is None


@pytest.mark.parametrize(("rows", "met"), [(8 * 132, True), (8 * 132 + 1, False)])
def test_workspace_is_at_most_eight_rows_per_sm(rows, met):
    assert verdicts(make_record(100.0, workspace_bytes=rows * 1024 * 4), sms=132)["workspace"] is met


@pytest.mark.parametrize(("with_dw", "met"), [(102.9, True), (103.1, False)])
def test_dw_costs_at_most_three_percent(with_dw, met):
    both = make_record(with_dw), make_record(100.0, op="dx")
    assert verdicts(*both)["dw"] is met
    ((_, cost),) = compare.dw_costs(make_result(*both))
    assert cost == pytest.approx(with_dw / 100 - 1)
    assert verdicts(make_record(with_dw, gb_per_s=900.0), make_record(100.0, op="dx"))["dw"] is None  # 93 MB


def test_the_summary_says_what_is_met_and_where_not():
    records = make_cell(100.0, ("quack", 120.0)) + make_cell(100.0, ("quack", 90.0), rows=8)
    records[0] |= {"workspace_bytes": 4 * 1024 * 264}
    text = compare.summary(make_result(*records, make_record(99.0, op="dx"), sms=132))
    assert "geometric mean of 2 ratios: 1.039" in text
    assert "NOT MET backward: at least 1.00x the best peer in every cell (2 cells)" in text
    assert "missed by 8 x 1024 (0.900x quack)" in text
    assert "met     backward's workspace" in text
    line = next(line for line in text.splitlines() if "1081344" in line)
    assert line.split() == ["4096", "x", "1024", "1081344", "264", "2.00", "+1.0%"]


def test_there_is_no_summary_without_a_gpu_or_peers():
    assert compare.summary(make_result(*make_cell(100.0, ("quack", 120.0)), gpu=None)) == ""
    assert compare.summary(make_result()) == ""
    assert compare.compare(make_result(make_record(100.0)), "backward") == []
