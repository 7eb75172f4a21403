# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pictures and pages that are made of results."""

from __future__ import annotations

import json
import math
import re

import pytest
from test_bench_compare import make_cell
from test_bench_results import make_record, make_result

from bench.measure.provenance import RESULTS
from bench.report import compare, plots, readme
from bench.report import tables as report


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

    monkeypatch.setattr("bench.report.heatmaps._draw", draw)
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
    shown, _, folded = report.page_section(result, images).split("<details>", 2)
    assert "(a-backward-map.png)" in shown and "(a-backward.png)" in folded, (
        "the picture of all providers is folded"
    )


def test_heat_maps_are_pictures_also_with_holes(tmp_path):
    grid = make_grid(copy_gb_per_s=None)
    del grid["records"][2:4]  # one cell
    for record in grid["records"]:
        if record["rows"] == 64:
            record["us"] = record["gb_per_s"] = record["copy_fraction"] = None
    (path,) = plots.plot_result(grid, tmp_path / "grid").values()
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_can_be_drawn_again(tmp_path, capsys):
    report.write_json(make_grid(), tmp_path / "grid.json")
    plots.main([str(tmp_path / "grid.json")])
    assert (tmp_path / "grid-backward.png").exists() and "grid-backward.png" in capsys.readouterr().out


def test_a_section_shows_the_mean_and_folds_the_tables():
    records = make_cell(100.0, ("quack", 150.0), ("tilegym", 160.0))
    records += make_cell(100.0, ("quack", 90.0), op="forward")
    records.append(make_record(99.0, op="dx"))
    text = report.page_section(make_result(*records), {"backward-map": "b.png", "forward-map": "f.png"})
    assert text.startswith("### NVIDIA H100 80GB HBM3, bfloat16\n\n")
    shown = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert "![backward, bfloat16](b.png)" in shown and "(f.png)" in shown and "|" not in shown
    assert "best of quack, tilegym at each shape: 1.50 times as fast (geometric mean of 1)" in shown
    assert "best of quack at each shape: 0.90 times as fast" in shown
    folded = re.findall(r"<summary>(.*)</summary>", text)
    assert folded[:4] == [
        "backward, bfloat16: shape by shape",
        "backward, bfloat16: GB/s of every provider",
        "forward, bfloat16: shape by shape",
        "forward, bfloat16: GB/s of every provider",
    ]
    assert text.count("<details>") == text.count("</details>") == len(folded)
    assert "dx" not in shown and "| quack " in text


def test_a_section_without_peers_shows_its_rates():
    text = report.page_section(make_result(make_record(100.0)), {"backward": "b.png"})
    shown = text.split("<details>")[0]
    assert "(b.png)" in shown and "| 4096 x 1024" in shown, "nothing else shows it"


def test_a_section_has_the_workspace_of_the_backward():
    text = report.page_section(make_result(make_record(100.0, workspace_bytes=8192)), {})
    assert "workspace, and what dw adds to the time</summary>\n\n| rows x cols" in text
    assert "8192 |   2 |" in text


def test_a_section_ends_with_the_targets():
    result = make_result(*make_cell(100.0, ("quack", 120.0)), *make_cell(100.0, ("quack", 90.0), rows=8))
    *_, folded = report.page_section(result, {}).split("<details>")
    title, *lines, end = (line for line in folded.splitlines() if line)
    assert (title, end) == ("<summary>Targets</summary>", "</details>")
    assert lines[0].startswith("- NOT MET backward: at least 1.00x the best peer in every cell (2 cells)")
    assert lines[0].endswith("missed by 8 x 1024 (0.900x quack)")
    assert len(lines) == len(compare.target_lines(result)) > 1
    for other in (make_grid(), make_result(*make_cell(100.0, ("quack", 120.0)), gpu=None)):
        assert "Targets" not in report.page_section(other, {}), (
            "of heat maps, and without a GPU, there are none"
        )


def test_the_overview_has_a_line_for_each_result():
    lost = make_cell(100.0, ("quack", 99.6), op="forward")  # 1.00 in the tables, which round
    not_timed = make_record(None, provider="tilegym")
    first = make_result(*make_cell(100.0, ("quack", 150.0), ("liger.triton", 170.0)), *lost, not_timed)
    second = make_result(*make_cell(100.0, ("quack", 120.0), dtype="float16"))
    lines = report.overview([first, second]).splitlines()
    titles = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert len({*titles}) == len(titles) == 6, "each says of which pass it is"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    gpu = first["gpu"]
    assert cells[0] == [f"{gpu}, bfloat16", "2", "1.50", "1 of 1", "1.00", "0 of 1"]
    assert cells[1] == [f"{gpu}, float16", "1", "1.20", "1 of 1", "", ""]


def test_a_section_of_a_grid_is_its_pictures_and_their_mean():
    text = report.page_section(make_grid(), {"backward": "b.png"})
    assert "(b.png)" in text and "|" not in text and "<details>" not in text
    assert text.startswith("### NVIDIA H100 80GB HBM3, bfloat16, over rows and columns\n")
    assert "best of quack at each shape: 1.27 times as fast (geometric mean of 6)." in text


def cells_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_means_are_told_apart_by_the_bytes_that_a_call_moves():
    short = make_cell(1.0, ("quack", 2.0), rows=16)  # 2 MB at the rate of all records
    result = make_result(*short, *make_cell(200.0, ("quack", 220.0)))
    name = "NVIDIA H100 80GB HBM3, bfloat16"
    assert cells_of(readme.sizes_table([result])) == [[name, "2.00 (1)", "1.10 (1)", "", ""]]


def test_the_cell_furthest_behind_is_named():
    cells = make_cell(100.0, ("quack", 90.0)) + make_cell(100.0, ("tilegym", 80.0), rows=8)
    cells += make_cell(100.0, rows=16) + make_cell(100.0, ("quack", 100.0), op="forward")
    name = "NVIDIA H100 80GB HBM3, bfloat16"
    assert cells_of(readme.behind_table([make_result(*cells), make_grid()])) == [
        [name, "backward", "2 of 2", "0.800", "8 x 1024", "tilegym"],
        [name, "forward", "0 of 1", "", "", ""],
        [f"{name}, grid", "backward", "2 of 6", "0.810", "1 x 64", "quack"],
    ]


def test_torch_compile_without_its_option():
    tried = {"enable_pdl=False": 130.0, "enable_pdl=True": 110.0}
    compiled = make_record(110.0, provider="torch.compile", tried_us=tried)
    failed = make_record(
        105.0, provider="torch.compile-max-autotune", tried_us={"enable_pdl=False": "failed"}
    )
    other = make_record(140.0, provider="quack", tried_us={"enable_pdl=False": 1.0})
    result = make_result(make_record(100.0), compiled, failed, other)
    without = readme.without_option(result)
    assert [each["us"] for each in without["records"]] == [100.0, 130.0, 105.0, 140.0]
    assert [each["us"] for each in result["records"]] == [100.0, 110.0, 105.0, 140.0]


def test_host_times_are_of_small_calls():
    records = make_cell(2.0, ("F.rms_norm", 3.0), rows=16, cols=4096)
    records += make_cell(2.0, ("F.rms_norm", 3.0), rows=16384, cols=4096)
    text = readme.host_table(make_result(*records))
    assert text.startswith("**NVIDIA H100 80GB HBM3, bfloat16**\n\n| rows x cols") and "| 16 x 4096" in text
    assert "16384" not in text


SECTIONS = ("overview", "sizes", "behind", "option", "host", "block", "bench", "train")


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A repository with empty pages: README.md, the page of all figures, the list of results."""
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    found = [tmp_path / name for name in ("README.md", readme.PAGE, readme.INDEX)]
    for page in found:
        page.parent.mkdir(parents=True, exist_ok=True)
        names = SECTIONS if page.name == "performance.md" else ("bench",)
        page.write_text("".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in names))
    return found


def test_pages_take_results_and_grids_together(pages, tmp_path):
    folder = tmp_path / "bench/results"
    half = make_result(*make_cell(100.0, ("quack", 140.0), dtype="float16"))
    results = {"a": make_result(*make_cell(100.0, ("quack", 150.0))), "a-grid": make_grid(), "half": half}
    elsewhere = tmp_path / "mine" / "b"
    report.write_json(half, elsewhere.with_suffix(".json"))
    plots.plot_result(half, elsewhere)
    for name, result in results.items():
        report.write_json(result, folder / f"{name}.json")
        plots.plot_result(result, folder / name)
    readme.refresh_results([*(folder / f"{name}.json" for name in results), elsewhere.with_suffix(".json")])
    front, every, listed = (page.read_text() for page in pages)
    assert front.count("| NVIDIA H100") == 3 and ", float16 " in front and ".png" not in front
    assert "tileiras 13.4.92" in front and "Measured on 2026-11-21" in front
    assert all(f"(../bench/results/{name}-backward.png)" in every for name in results)
    assert "(../mine/b-backward-map.png)" in every and "GB/s of every provider" in every
    assert every.count("\n### ") == 4 and "bfloat16, over rows and columns" in every
    assert "[a-grid](a-grid.json)" in listed and "[b](../../mine/b.json)" in listed


def test_training_has_a_section_of_its_own(pages, tmp_path):
    path = tmp_path / "bench/results/gpu/train.json"
    path.parent.mkdir()
    kept = max(RESULTS.glob("*/train.json"))
    path.write_text(kept.read_text())
    readme.refresh_training(path)
    text = pages[1].read_text()
    assert "(../bench/results/gpu/train.png)" in text and "tokens/s" in text


def test_the_newest_of_each_gpu_and_dtype_are_shown(tmp_path):
    def keep(name, result, folder="h100"):
        path = tmp_path / folder / f"{name}.json"
        report.write_json(result, path)
        return path

    late = {"date": "2026-11-22T10:00:00+00:00"}
    keep("z", make_result(make_record()))
    new, grid = keep("b", make_result(make_record(), **late)), keep("c-grid", make_grid())
    half, other = keep("a", make_result(make_record(dtype="float16"))), keep("a", make_grid(), "h200")
    keep("cpu", make_result(make_record(), gpu=None, **late))
    (tmp_path / "h100" / "train.json").write_text('{"gpu": "H100", "runs": []}')
    assert readme.kept_results(tmp_path) == [new, half, grid, other]


def test_the_pages_show_what_is_kept():
    """Figures are never typed by hand: `python scripts/docs_figures.py` writes them."""
    paths = readme.kept_results(RESULTS)
    results = readme.load(paths)
    (training,) = RESULTS.glob("*/train.json")
    expected = readme.page_sections(results) | {"train": readme.training_section(training)}
    text = (readme.ROOT / readme.PAGE).read_text()
    assert set(re.findall(r"<!-- (\w+):begin -->", text)) == set(expected) == set(SECTIONS)
    for name, section in expected.items():
        assert shown(text, name) == section, name
    assert shown((readme.ROOT / readme.INDEX).read_text(), "bench") == readme.index(results)
    assert shown((readme.ROOT / "README.md").read_text(), "bench") == readme.readme_section(results)


def shown(text, name):
    [section] = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    return section.strip()


def test_settings_that_were_tried_stay_in_the_json_alone(tmp_path):
    record = make_record(100.0, provider="quack", settings="fast", tried_us={"fast": 100.0, "slow": 120.0})
    report.write_json(make_result(record), tmp_path / "a.json")
    report.write_csv(make_result(record), tmp_path / "a.csv")
    assert json.loads((tmp_path / "a.json").read_text())["records"] == [record]
    assert "tried_us" not in (tmp_path / "a.csv").read_text()
