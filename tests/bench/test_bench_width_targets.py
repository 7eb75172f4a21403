# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The targets of drawn widths, the command that says which are met, and the page that shows them."""

from __future__ import annotations

import pytest
from bench_records import cell, make_record, make_result

from bench.measure.widths import sections
from bench.report import compare, readme, tables, width_targets

COLS = {"wide": 28672, "drawn": 2008, "heads": 72, "unaligned": 2001}
LARGE = {"rows": 50000, "cols": 2008}  # 201 MB of bfloat16


def make_widths(*records, **changes):
    return make_result(*records, widths=1, **changes)


def only(text, *records, **changes):
    """The target that begins so."""
    [target] = [
        each for each in compare.targets(make_widths(*records, **changes)) if each.text.startswith(text)
    ]
    return target


def cells(ratios, op, part):
    """A cell for each ratio to the best peer, of as many rows as its number."""
    found = [cell(100.0, 100 * ratio, op, rows=8 + n, cols=COLS[part]) for n, ratio in enumerate(ratios)]
    return sum(found, [])


def test_targets_without_cells_are_open():
    found = compare.targets(make_widths(make_record(op="dx")))
    assert {each.is_met for each in found} == {None}


@pytest.mark.parametrize(
    ("part", "op", "least"),
    [
        ("wide", "residual_forward", 0.985),
        ("wide", "bias_forward", 0.985),
        ("wide", "residual_backward", 0.985),
        ("wide", "bias_backward", 0.985),
        ("drawn", "forward", 0.97),
        ("drawn", "residual_backward", 0.97),
        ("heads", "forward", 0.985),
        ("heads", "qk_norm_forward", 0.985),
        ("unaligned", "residual_forward", 0.97),
        ("unaligned", "backward", 0.97),
    ],
)
def test_every_cell_against_the_best_peer(part, op, least):
    text = f"{part} {op.rpartition('_')[2]}: at least {least}x the best peer in every cell"
    for ratio, met in ((least, True), (least - 0.001, False)):
        target = only(text, *cells((1.2, ratio), op, part))
        assert target.is_met is met and target.cells == 2 and target.figures == f"the lowest is {ratio:.3f}"
    assert target.missed == [f"{op} 9 x {COLS[part]} ({ratio:.3f}x quack)"]
    for other in COLS.keys() - {part}:
        assert only(text, *cells((0.5,), op, other)).is_met is None


def test_heads_backward_has_no_peer_to_beat():
    found = compare.targets(make_widths(*cells((0.5,), "backward", "heads")))
    assert not [each.text for each in found if "heads backward" in each.text and "peer" in each.text]


@pytest.mark.parametrize("part", ["drawn", "unaligned"])
@pytest.mark.parametrize(("direction", "good"), [("forward", 0.985), ("backward", 1.0)])
def test_most_cells_are_as_fast_as_the_best_peer(part, direction, good):
    """Plain ones and those with a residual counted together."""
    text = f"{part} {direction}: at least {good}x the best peer in 95%"
    for behind, met in ((1, True), (2, False)):
        plain = cells([good] * (12 - behind) + [good - 0.001] * behind, direction, part)
        target = only(text, *plain, *cells([good] * 8, f"residual_{direction}", part))
        assert (
            target.is_met is met and target.cells == 20 and target.figures == f"{1 - behind / 20:.1%} of them"
        )
        assert len(target.missed) == (0 if met else behind)


@pytest.mark.parametrize(
    ("part", "op", "share"),
    [
        ("wide", "residual_forward", 0.80),
        ("wide", "bias_backward", 0.80),
        ("heads", "backward", 0.85),
        ("heads", "qk_norm_backward", 0.85),
    ],
)
def test_the_share_of_the_copy_in_every_cell(part, op, share):
    text = f"{part} {op.rpartition('_')[2]}: at least {share:.0%} of the copy ceiling in every cell"
    for found, met in ((share, True), (share - 0.001, False)):
        record = make_record(op=op, rows=8, cols=COLS[part], copy_fraction=found)
        assert only(text, record).is_met is met


def test_the_share_of_the_copy_of_drawn_widths_is_of_large_backwards():
    text = "drawn backward: at least {:.0%} of the copy ceiling where x has 200 MB, of {}"
    wide, narrow = text.format(0.9, "512 columns"), text.format(0.85, "fewer than 512")
    for op in ("backward", "residual_backward"):
        for found, met in ((0.9, True), (0.899, False)):
            record = make_record(op=op, copy_fraction=found, **LARGE)
            assert only(wide, record).is_met is met and only(narrow, record).is_met is None
        for found, met in ((0.85, True), (0.849, False)):
            record = make_record(op=op, copy_fraction=found, rows=200000, cols=504)
            assert only(narrow, record).is_met is met and only(wide, record).is_met is None
    assert only(wide, make_record(copy_fraction=0.5, rows=5000, cols=2008)).is_met is None, "20 MB"
    assert only(wide, make_record(op="forward", copy_fraction=0.5, **LARGE)).is_met is None
    odd = make_record(copy_fraction=0.5, rows=50000, cols=2001)
    assert only(wide, odd).is_met is None and only(wide.replace("drawn", "unaligned"), odd).is_met is False
    of_float32 = make_record(copy_fraction=0.5, rows=25000, cols=2008, dtype="float32")
    assert only(wide, of_float32).is_met is False, "200 MB of its dtype"


def test_the_worst_cells_are_named_first_and_some_alone():
    ratios = [0.9 + number / 1000 for number in range(20)]
    target = only("drawn forward: at least 0.97x", *cells(ratios, "forward", "drawn"))
    assert target.missed[0] == "forward 8 x 2008 (0.900x quack)" and target.missed[-1] == "12 more"
    assert len(target.missed) == width_targets.NAMED + 1


def test_a_cell_where_triton_is_the_faster_backend_says_so():
    """There "auto" may choose it."""
    records = cells((0.9,), "residual_forward", "wide")
    for us, text in ((80.0, ", triton 1.125x"), (101.0, "")):
        cell_of_triton = {"op": "residual_forward", "rows": 8, "cols": COLS["wide"], "provider": "triton"}
        plain = make_record(1.0, **cell_of_triton | {"op": "forward"})
        target = only("wide forward: at least 0.985x", *records, make_record(us, **cell_of_triton), plain)
        assert target.missed == [f"residual_forward 8 x 28672 (0.900x quack{text})"]


def test_a_cell_that_cutile_fails_in_is_a_target_missed():
    failed = make_record(None, op="bias_forward", rows=8, cols=28671)
    target = only("wide: cutile has a figure", failed, make_record(op="bias_forward", rows=8, cols=28672))
    assert target.missed == ["bias_forward 8 x 28671 (failed)"] and target.cells == 2
    assert target.figures == "of 112 in the whole draw"


def test_every_cell_of_a_whole_draw_belongs_to_a_part():
    records = [
        make_record(op=op, rows=rows, cols=cols)
        for section in sections(1, "bfloat16")
        for op in section.ops
        for rows, cols in section.shapes
    ]
    found = [only(f"{part}: cutile has", *records) for part in width_targets.PARTS]
    assert [each.cells for each in found] == [112, 240, 108, 240] and len(records) == 700
    assert all(each.figures == f"of {each.cells} in the whole draw" for each in found)


def test_the_table_has_the_worst_of_each_part_and_direction():
    records = cells((1.2, 0.99), "backward", "drawn") + cells((1.2,), "qk_norm_forward", "heads")
    records.append(make_record(rows=7, cols=2008, copy_fraction=0.5))  # without a peer
    rows = [[each.strip() for each in line.split("|")[1:-1]] for line in table_lines(records)]
    assert rows == [
        ["drawn", "backward", "3", "0.990", "backward 9 x 2008", "50% at 1.0x", "50.0%", "backward 7 x 2008"],
        ["heads", "forward", "1", "1.200", *["qk_norm_forward 8 x 72", "100% at 0.985x", "66.0%"]]
        + ["qk_norm_forward 8 x 72"],
    ]


def table_lines(records):
    return width_targets.table(make_widths(*records)).splitlines()[2:]


def test_a_command_says_which_targets_a_result_meets(tmp_path, capsys):
    path = tmp_path / "a.json"
    tables.write_json(make_widths(*cells((1.2,), "forward", "drawn")), path)
    assert width_targets.main([str(path)]) == 0, "those without cells are open"
    text = capsys.readouterr().out
    assert "; seed 1\n" in text and "| drawn  | forward" in text
    assert (
        "met     drawn forward: at least 0.97x the best peer in every cell (1 cells): the lowest is 1.200"
        in text
    )
    assert "open    wide: cutile has a figure in every cell (no cells)" in text
    tables.write_json(make_widths(*cells((0.9,), "forward", "drawn")), path)
    assert width_targets.main([str(path)]) == 1
    assert "NOT MET drawn forward: at least 0.97x" in capsys.readouterr().out
    for other in (make_result(make_record()), make_widths(make_record(), gpu=None)):
        tables.write_json(other, path)
        with pytest.raises(SystemExit, match="2"):
            width_targets.main([str(path)])
        assert "expected a result of bench/run.sh --widths on a GPU, got" in capsys.readouterr().err


def test_the_page_has_a_section_of_each_result(tmp_path):
    path = tmp_path / "gpu" / "2026-11-21-bfloat16-widths.json"
    tables.write_json(make_widths(*cells((0.9,), "forward", "drawn")), path)
    results = readme.load(readme.kept_results(tmp_path))
    sections = readme.page_sections(results)
    assert sections["bench"] == sections["block"] == "" and "drawn widths" in readme.index(results)
    text = sections["widths"]
    assert "### NVIDIA H100 80GB HBM3, bfloat16, widths of seed 1" in text and "| drawn  | forward" in text
    assert "- NOT MET drawn forward: at least 0.97x the best peer in every cell (1 cells)" in text
    assert readme.widths_section([]) == ""
