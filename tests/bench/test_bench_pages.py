# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pictures and pages that are made of results."""

from __future__ import annotations

import json
import math

import pytest
from test_bench_compare import make_cell
from test_bench_results import make_record, make_result

from bench import compare, plots, readme, report


def make_grid(**changes):
    records = []
    for rows in (1, 64, 4096):
        for cols in (64, 1024):
            records += make_cell(100.0, ("quack", 80.0 + rows % 100), rows=rows, cols=cols)
    return make_result(*records, is_grid=True, **changes)


def test_a_grid_is_drawn_as_heat_maps(tmp_path, monkeypatch):
    drawn = {}

    def draw(axes, values, labels, **colours):
        drawn[colours["cmap"]] = values, labels

    monkeypatch.setattr("bench.heatmaps._draw", draw)
    paths = plots.plot_result(make_grid(), tmp_path / "2026-11-21-bfloat16-grid")
    assert [path.name for path in paths.values()] == ["2026-11-21-bfloat16-grid-backward.png"]
    ratios, labels = drawn["RdBu"]
    assert ratios[64, 1024] == pytest.approx(math.log2(1.44)) and labels[64, 1024] == "1.44"
    assert drawn["Greens"][1][1, 64] == "66%"


def test_a_result_with_peers_has_both_pictures(tmp_path):
    result = make_grid()
    del result["is_grid"]
    paths = plots.plot_result(result, tmp_path / "a")
    assert {name: path.name for name, path in paths.items()} == {
        "backward": "a-backward.png",
        "backward-map": "a-backward-map.png",
    }
    images = {name: path.name for name, path in paths.items()}
    full, brief = (report.readme_section(result, images, is_brief=is_brief) for is_brief in (False, True))
    assert "(a-backward.png)" in full and "(a-backward-map.png)" in full
    assert "(a-backward.png)" not in brief and "(a-backward-map.png)" in brief


def test_heat_maps_are_pictures_also_with_holes(tmp_path):
    grid = make_grid()
    del grid["records"][2:4]  # one cell
    for record in grid["records"]:
        if record["rows"] == 64:
            record["us"] = record["gb_per_s"] = record["copy_fraction"] = None
    for each in (grid, make_grid(copy_gb_per_s=None)):
        (path,) = plots.plot_result(each, tmp_path / "grid").values()
        assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_can_be_drawn_again(tmp_path, capsys):
    report.write_json(make_grid(), tmp_path / "grid.json")
    plots.main([str(tmp_path / "grid.json")])
    assert (tmp_path / "grid-backward.png").exists() and "grid-backward.png" in capsys.readouterr().out


def test_readme_shows_the_best_peer_and_folds_the_rest(tmp_path):
    records = make_cell(100.0, ("quack", 150.0), ("tilegym", 160.0))
    records += make_cell(100.0, ("quack", 90.0), op="forward")
    records.append(make_record(99.0, op="dx"))
    text = report.readme_section(make_result(*records), {"backward": "b.png", "forward": "f.png"})
    shown, folded = text.split("<details>", 1)
    assert "![backward, bfloat16](b.png)" in shown
    assert "1.50 times as fast (geometric mean of 1)" in shown and "| quack " in shown
    assert "best of quack, tilegym at each shape: 1.50" in shown
    assert "best of quack at each shape: 0.90 times as fast" in folded and "(f.png)" in folded
    assert text.count("<details>") == text.count("</details>") == 4
    assert "dx" not in text


def test_a_brief_section_leaves_the_other_providers_out(tmp_path):
    result = make_result(*make_cell(100.0, ("quack", 150.0), ("tilegym", 160.0)))
    full, brief = (report.readme_section(result, {}, is_brief=is_brief) for is_brief in (False, True))
    assert "| 4096 x 1024" in brief and "1.50 times as fast" in brief
    assert "GB/s of every provider" in full and "GB/s of every provider" not in brief
    assert "Targets" in full and "Targets" not in brief
    alone = make_result(make_record(100.0))
    assert "| 4096 x 1024" in report.readme_section(alone, {}, is_brief=True), "nothing else shows it"


def test_a_brief_section_folds_the_table_of_the_backward():
    """README.md shows its map and its mean at once."""
    records = make_cell(100.0, ("quack", 150.0)) + make_cell(100.0, ("quack", 90.0), op="forward")
    text = report.readme_section(make_result(*records), {"backward-map": "b.png"}, is_brief=True)
    shown, table, rest = text.split("<details>", 2)
    assert "![backward, bfloat16](b.png)" in shown and "1.50 times as fast (geometric mean of 1)" in shown
    assert table.startswith("<summary>backward, bfloat16: shape by shape</summary>\n\n| rows x cols")
    assert table.rstrip().endswith("</details>") and "| 4096 x 1024" not in shown
    assert rest.count("<summary>") == 1 and "| 4096 x 1024" in rest, "the forward is folded as a whole"
    full = report.readme_section(make_result(*records), {"backward-map": "b.png"})
    assert "| 4096 x 1024" in full.split("<details>", 1)[0]


def test_a_section_ends_with_the_targets():
    result = make_result(*make_cell(100.0, ("quack", 120.0)), *make_cell(100.0, ("quack", 90.0), rows=8))
    *_, folded = report.readme_section(result, {}).split("<details>")
    title, *lines, end = (line for line in folded.splitlines() if line)
    assert (title, end) == ("<summary>Targets</summary>", "</details>")
    assert lines[0].startswith("- NOT MET backward: at least 1.00x the best peer in every cell (2 cells)")
    assert lines[0].endswith("missed by 8 x 1024 (0.900x quack)")
    assert len(lines) == len(compare.target_lines(result)) > 1
    for other in (make_grid(), make_result(*make_cell(100.0, ("quack", 120.0)), gpu=None)):
        assert "Targets" not in report.readme_section(other, {}), (
            "of heat maps, and without a GPU, there are none"
        )


def test_the_overview_has_a_line_for_each_result():
    lost = make_cell(100.0, ("quack", 99.6), op="forward")  # 1.00 in the tables, which round
    not_timed = make_record(None, provider="tilegym")
    first = make_result(*make_cell(100.0, ("quack", 150.0), ("liger.triton", 170.0)), *lost, not_timed)
    second = make_result(*make_cell(100.0, ("quack", 120.0), dtype="float16"))
    lines = report.overview([first, second]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    gpu = first["gpu"]
    assert cells[0] == [f"{gpu}, bfloat16", "2", "1.50", "1 of 1", "1.00", "0 of 1"]
    assert cells[1] == [f"{gpu}, float16", "1", "1.20", "1 of 1", "", ""]


def test_readme_of_a_grid_is_its_pictures_and_their_mean(tmp_path):
    text = report.readme_section(make_grid(), {"backward": "b.png"})
    assert "(b.png)" in text and "|" not in text
    assert "**backward, bfloat16, over rows and columns**" in text
    assert "best of quack at each shape: 1.27 times as fast (geometric mean of 6)." in text


def test_readme_takes_results_and_grids_together(tmp_path, monkeypatch):
    every, folder = tmp_path / "bench/results/README.md", tmp_path / "bench/results"
    folder.mkdir(parents=True)
    for path in (tmp_path / "README.md", every):
        path.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    half = make_result(*make_cell(100.0, ("quack", 140.0), dtype="float16"))
    results = {"a": make_result(*make_cell(100.0, ("quack", 150.0))), "a-grid": make_grid(), "half": half}
    elsewhere = tmp_path / "mine" / "b"
    report.write_json(half, elsewhere.with_suffix(".json"))
    plots.plot_result(half, elsewhere)
    for name, result in results.items():
        report.write_json(result, folder / f"{name}.json")
        plots.plot_result(result, folder / name)
    readme.refresh_results([*(folder / f"{name}.json" for name in results), elsewhere.with_suffix(".json")])
    text = (tmp_path / "README.md").read_text()
    assert "(bench/results/a-backward-map.png)" in text and "(bench/results/a-grid-backward.png)" in text
    assert "**backward, bfloat16**" in text and ", float16 " in text
    assert "half-backward.png" not in text and "every provider" not in text
    text = every.read_text()
    assert all(f"({name}-backward.png)" in text for name in results)
    assert "**backward, bfloat16**" in text and "<summary>backward, float16</summary>" in text
    assert "GB/s of every provider" in text and "(../../mine/b-backward.png)" in text


def test_settings_that_were_tried_stay_in_the_json_alone(tmp_path):
    record = make_record(100.0, provider="quack", settings="fast", tried_us={"fast": 100.0, "slow": 120.0})
    report.write_json(make_result(record), tmp_path / "a.json")
    report.write_csv(make_result(record), tmp_path / "a.csv")
    assert json.loads((tmp_path / "a.json").read_text())["records"] == [record]
    assert "tried_us" not in (tmp_path / "a.csv").read_text()
