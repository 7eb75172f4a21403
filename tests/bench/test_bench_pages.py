# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pictures and pages that are made of results."""

from __future__ import annotations

import math
import re

import pytest
from bench_records import assert_golden, cell, make_record, make_result
from test_bench_compare import make_cell

from bench.measure.provenance import RESULTS, gpu_slug
from bench.report import overview, plots, readme, widths
from bench.report import tables as report
from bench.studies import one_launch_or_two, rope, traced


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


def test_heat_maps_can_be_drawn_again_also_with_holes(tmp_path, capsys):
    grid = make_grid(copy_gb_per_s=None)
    del grid["records"][2:4]  # one cell
    for record in grid["records"]:
        if record["rows"] == 64:
            record["us"] = record["gb_per_s"] = record["copy_fraction"] = None
    report.write_json(grid, tmp_path / "grid.json")
    plots.main([str(tmp_path / "grid.json")])
    assert (tmp_path / "grid-backward.png").read_bytes().startswith(b"\x89PNG")
    assert "grid-backward.png" in capsys.readouterr().out


def make_models():
    """A call as fast as the best peer and one that is not, though the tables round it to 1.00; of the forward none."""
    tried = {"enable_pdl=False": 130.0, "enable_pdl=True": 103.0}
    compiled = make_record(103.0, provider="torch.compile", tried_us=tried)
    tried = {"enable_pdl=False": "failed", "enable_pdl=True": 110.0}
    failed = make_record(110.0, provider="torch.compile-max-autotune", tried_us=tried)
    records = [*make_cell(100.0, ("quack", 150.0), rows=4096), compiled, failed, make_record(99.0, op="dx")]
    records += make_cell(2.0, ("F.rms_norm", 1.992), ("tilegym", None), rows=16, cols=4096)
    records.append(make_record(1.0, op="forward", rows=16, cols=4096))
    records[0]["workspace_bytes"] = 8192
    return make_result(*records, sms=132)


def test_pages_are_made_of_results(tmp_path, monkeypatch):
    """README.md, the page of means, the list of results and the page of each, whole. They link to pictures where there
    are some."""
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(overview, "plot", lambda result, path: None)
    pages = {name: tmp_path / name for name in ("README.md", readme.PAGE, readme.INDEX)}
    for name, page in pages.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        sections = SECTIONS if name == readme.PAGE else ("bench",)
        page.write_text("".join(f"<!-- {each}:begin -->\n<!-- {each}:end -->\n" for each in sections))
    models, grid = tmp_path / "bench/results/models.json", tmp_path / "mine/grid.json"
    report.write_json(make_models(), models)
    report.write_json(make_grid(), grid)
    for picture in ("models-backward", "models-backward-map", "models-forward"):
        models.with_name(f"{picture}.png").touch()
    grid.with_name("grid-backward.png").touch()
    readme.refresh_results([models, grid])
    pages |= {f"{path.stem}.md": path.with_suffix(".md") for path in (models, grid)}
    assert_golden("\n".join(f"# {name}\n\n{page.read_text()}" for name, page in pages.items()), "pages.txt")


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


SECTIONS = ("overview", "behind", "option", "host", "block", "bench", "train")


def test_the_pages_show_what_is_kept(monkeypatch):
    """Figures are never typed by hand: `python scripts/docs_figures.py` writes them."""
    written, beside = {}, {}
    monkeypatch.setattr(
        readme, "refresh", lambda page, section, text: written.update({(page, section): text})
    )
    monkeypatch.setattr(overview, "plot", lambda result, path: None)
    monkeypatch.setattr(readme.Path, "write_text", lambda page, text: beside.update({page: text}))
    readme.refresh_results(readme.kept_results(RESULTS))
    readme.refresh_training(*RESULTS.glob("*/train.json"))
    for (page, section), expected in written.items():
        [shown] = re.findall(
            rf"<!-- {section}:begin -->\n(.*?)<!-- {section}:end -->", page.read_text(), re.DOTALL
        )
        assert shown.strip() == expected, (page, section)
    assert len(beside) == 10 and all(page.read_text() == text for page, text in beside.items())
    pages = [readme.ROOT / name for name in ("README.md", readme.PAGE, readme.INDEX)]
    marked = {
        (page, name) for page in pages for name in re.findall(r"<!-- (\w+):begin -->", page.read_text())
    }
    assert marked == set(written) and {name for page, name in marked if page == pages[1]} == set(SECTIONS)


@pytest.mark.parametrize(
    "study", [one_launch_or_two, rope, traced], ids=lambda study: study.__name__.rpartition(".")[2]
)
def test_the_pages_of_studies_show_what_is_kept(study, tmp_path):
    kept, page = study.PAGE.read_text(), tmp_path / "page.md"
    page.write_text(re.sub(r"(<!-- \w+:begin -->).*(<!-- \w+:end -->)", r"\1\2", kept, flags=re.DOTALL))
    assert page.read_text() != kept
    assert study.refresh_page(page) > 0 and page.read_text() == kept


def test_a_study_shows_the_newest_result_of_each_gpu(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a:begin -->\nold\n<!-- a:end -->\nafter\n")
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    kept = ((h100, "2026-11-29"), (h100, "2026-11-28"), (h200, "2026-11-27"), (None, "2026-11-30"))
    for gpu, day in kept:
        path = tmp_path / gpu_slug(gpu) / f"{day}-a.json"
        report.write_json(make_result(gpu=gpu, date=f"{day}T10:00:00+00:00"), path)
        report.write_json(make_result(gpu=gpu), path.with_name("2026-12-01-other.json"))
    text = lambda result: result["date"][:10]  # noqa: E731
    assert readme.refresh_study(page, "a", tmp_path, "-a.json", text) == 2
    assert page.read_text() == (
        "before\n<!-- a:begin -->\n\n2026-11-29\n\n2026-11-27\n\n<!-- a:end -->\nafter\n"
    )
    assert readme.refresh_study(page, "a", tmp_path / "none", "-a.json", text) == 0
    assert page.read_text() == "before\n<!-- a:begin -->\n<!-- a:end -->\nafter\n"


def test_drawn_widths_have_a_page_with_the_worst_of_each_part_and_direction(tmp_path):
    records = [*cell(100.0, 120.0, "backward", rows=8, cols=2008), *cell(100.0, 99.0, "backward", cols=2008)]
    records.append(make_record(rows=7, cols=2008, copy_fraction=0.5))  # without a peer
    result = make_result(*records, *cell(100.0, 120.0, "qk_norm_forward", rows=8, cols=72), widths=1)
    rows = [
        [each.strip() for each in line.split("|")[1:-1]] for line in widths.table(result).splitlines()[2:]
    ]
    assert rows == [
        ["drawn", "backward", "3", "0.990", "backward 4096 x 2008", "50% at 1.0x", "50.0%"]
        + ["backward 7 x 2008"],
        ["heads", "forward", "1", "1.200", *["qk_norm_forward 8 x 72", "100% at 0.985x", "66.0%"]]
        + ["qk_norm_forward 8 x 72"],
    ]
    report.write_json(result, tmp_path / "gpu" / "2026-11-21-bfloat16-widths.json")
    results = readme.load(readme.kept_results(tmp_path))
    [text] = readme.result_pages(results).values()
    assert (
        "the widths is 1." in text
        and "| drawn  | backward" in text
        and "drawn widths" in readme.index(results)
    )


def test_settings_that_were_tried_are_not_in_the_csv(tmp_path):
    report.write_csv(make_result(make_record(tried_us={"fast": 100.0})), tmp_path / "a.csv")
    assert "tried_us" not in (tmp_path / "a.csv").read_text()
