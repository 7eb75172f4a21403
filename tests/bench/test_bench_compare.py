# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""cutile against its peers: ratios, means, workspace."""

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


@pytest.mark.parametrize(("gb_per_s", "cost"), [(1000.0, "+3.1%"), (900.0, "")])
def test_the_cost_of_dw_is_that_of_large_calls(gb_per_s, cost):
    """103 MB and 93 MB."""
    records = make_record(103.1, gb_per_s=gb_per_s), make_record(100.0, op="dx")
    *_, line = compare.workspace_table(make_result(*records, sms=132), "pipe").splitlines()
    assert line.split("|")[-2].strip() == cost


def test_the_summary_has_means_and_workspace():
    records = make_cell(100.0, ("quack", 120.0)) + make_cell(100.0, ("quack", 90.0), rows=8)
    records[0] |= {"workspace_bytes": 4 * 1024 * 264}
    text = compare.summary(make_result(*records, make_record(99.0, op="dx"), sms=132))
    assert "geometric mean of 2 ratios: 1.039" in text
    line = next(line for line in text.splitlines() if "1081344" in line)
    assert line.split() == ["4096", "x", "1024", "1081344", "264", "2.00", "+1.0%"]


def test_there_is_no_summary_without_a_gpu_or_peers():
    assert compare.summary(make_result(*make_cell(100.0, ("quack", 120.0)), gpu=None)) == ""
    assert compare.summary(make_result()) == ""
    assert compare.compare(make_result(make_record(100.0)), "backward") == []
