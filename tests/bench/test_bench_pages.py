# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pictures and pages that are made of results: who is who, what stands above and below, how large a file is; and
report.html: what stands in its tables and plots, and that it needs nothing else."""

import html
import json
import math
import re
import runpy
import sys

import numpy as np
import pytest
from bench_records import assert_golden, cell, make_record, make_result
from matplotlib.figure import Figure
from PIL import Image
from test_bench_results import make_cell

from bench import remedy
from bench.measure.provenance import RESULTS, gpu_slug, kept_in
from bench.providers.ours import LEVELLED
from bench.providers.peers import ALL_PROVIDERS
from bench.report import curves, device_time, html_report, overview, pictures, plots, readme, widths
from bench.report import tables as report
from bench.report.styles import OTHER, STYLES
from bench.studies import one_launch_or_two, rope, torchtitan, traced


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
    (tmp_path / "h100" / "train-llama-1b-eager.json").write_text('{"gpu": "H100", "trained": []}')
    assert readme.kept_results(tmp_path) == [new, half, grid, other]


SECTIONS = ("overview", "behind", "option", "host", "block", "bench")


def test_the_pages_show_what_is_kept(monkeypatch):
    """Figures are never typed by hand: `python scripts/docs_figures.py` writes them."""
    written, beside = {}, {}
    monkeypatch.setattr(
        readme, "refresh", lambda page, section, text: written.update({(page, section): text})
    )
    for module in (overview, curves, device_time):
        monkeypatch.setattr(module, "plot", lambda *_: None)
    monkeypatch.setattr(readme.Path, "write_text", lambda page, text: beside.update({page: text}))
    readme.refresh_results(readme.kept_results(RESULTS))
    readme.refresh_training([path for path, _ in kept_in(RESULTS, "*/train-*.json")])
    for (page, section), expected in written.items():
        [shown] = re.findall(
            rf"<!-- {section}:begin -->\n(.*?)<!-- {section}:end -->", page.read_text(), re.DOTALL
        )
        assert shown.strip() == expected, (page, section)
    assert len(beside) == 10 and all(page.read_text() == text for page, text in beside.items())
    pages = [readme.ROOT / name for name in ("README.md", readme.PAGE, readme.INDEX, readme.TRAINING)]
    marked = {
        (page, name) for page in pages for name in re.findall(r"<!-- (\w+):begin -->", page.read_text())
    }
    assert marked == set(written) and {name for page, name in marked if page == pages[1]} == set(SECTIONS)


@pytest.mark.parametrize(
    "study",
    [one_launch_or_two, rope, torchtitan, traced],
    ids=lambda study: study.__name__.rpartition(".")[2],
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


def make_peered(**changes):
    return make_result(make_record(), make_record(120.0, provider="quack", gb_per_s=1600.0), **changes)


@pytest.fixture
def figures(monkeypatch):
    """Record figures."""
    found, save = [], pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: (found.append(figure), save(figure, path)))
    return found


def test_every_provider_has_a_style_of_its_own():
    assert set(ALL_PROVIDERS) - set(LEVELLED) == set(STYLES)
    for kind in zip(*STYLES.values(), OTHER, strict=True):
        assert len(set(kind)) == len(STYLES) + 1, kind


def test_pictures_say_of_which_gpu_they_are_and_cut_nothing_off(figures, tmp_path):
    """The largest result of plain norms has most providers and the longest footer."""
    kept = [path for path in RESULTS.glob("*/*.json") if not path.stem.endswith(("-block", "-widths"))]
    result = json.loads(max(kept, key=lambda path: path.stat().st_size).read_text())
    records = [each for each in result["records"] if each["op"] == "backward"]
    paths = plots.plot_result({**result, "records": records}, tmp_path / "a")
    assert list(paths) == ["backward", "backward-map"] and len(figures) == 2
    for figure, path in zip(figures, paths.values(), strict=True):
        assert result["gpu"] in figure.get_suptitle()
        for box in (part.get_window_extent() for part in figure.texts):
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width and 0 <= box.y0 < box.y1 <= figure.bbox.height
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size <= pictures.MOST_BYTES


@pytest.mark.parametrize("is_grid", [False, True])
def test_without_a_gpu_there_are_no_pictures(is_grid, figures, tmp_path):
    """One was a dark red 0.00: kernels' interpreters against PyTorch."""
    result = make_peered(gpu=None, copy_gb_per_s=None, is_grid=is_grid, note="Not GPU figures.")
    assert plots.plot_result(result, tmp_path / "a") == {} and not figures


def test_shapes_have_no_line_through_them(figures, tmp_path):
    shapes = ((16, 4096), (131072, 64), (4096, 1024))
    records = [
        make_record(rows=rows, cols=cols, provider=provider)
        for rows, cols in shapes
        for provider in ("cutile", "quack", "a new one")
    ]
    plots.plot_result(make_result(*records), tmp_path / "a")
    axes = figures[0].axes[0]
    (copy,) = axes.lines
    assert copy.get_label() == "device copy"
    assert len(axes.patches) == len(shapes), "a bar of ours for each"
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    assert names == {"cutile", "quack", "a new one", "device copy"}
    assert len({text.get_text() for text in axes.texts}) == 3, (
        "each shape is of another group, which has a name"
    )


def test_a_saved_picture_keeps_the_colours_of_its_cells(tmp_path):
    """Pillow's own palettes made light greens pink."""
    figure = Figure(figsize=(4, 4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(np.arange(16).reshape(4, 4), cmap="Greens")
    for row, col in np.ndindex(4, 4):
        axes.text(col, row, "12%", ha="center", color="white" if row > 1 else "black")
    figure.savefig(tmp_path / "plain.png", dpi=pictures.DPI)
    pictures.save(figure, tmp_path / "small.png")
    plain, small = (Image.open(tmp_path / f"{name}.png").convert("RGB") for name in ("plain", "small"))
    for at in np.ndindex(4, 4):
        corner = tuple(110 * each + 30 for each in at)
        assert small.getpixel(corner) == plain.getpixel(corner)
    assert (tmp_path / "small.png").stat().st_size < (tmp_path / "plain.png").stat().st_size


def test_a_picture_of_too_many_colours_gets_fewer(tmp_path):
    figure = Figure(figsize=(4, 4))
    noise = np.random.default_rng(0).random((360, 360))
    figure.add_axes((0, 0, 1, 1)).imshow(noise, cmap="viridis", interpolation="nearest")
    pictures.save(figure, tmp_path / "a.png")
    assert 0 < (tmp_path / "a.png").stat().st_size <= pictures.MOST_BYTES


def test_the_picture_of_readme_shows_the_fastest_of_several_kernels(figures, tmp_path):
    result = overview.result_shown(readme.load(readme.kept_results(RESULTS)).values())
    overview.plot(result, tmp_path / "a.png")
    (figure,) = figures
    assert result["gpu"] in figure.get_suptitle()
    rates = {
        (each["rows"], each["cols"], each["provider"]): each["gb_per_s"]
        for each in result["records"]
        if each["op"] == "backward"
    }
    shown = {group.get_label(): [bar.get_height() for bar in group] for group in figure.axes[0].containers}
    liger = next(heights for label, heights in shown.items() if "Liger" in label)
    for number, shape in enumerate(overview.MODELS):
        assert shown["this package"][number] == rates[(*shape, "cutile")]
        kernels = [rates[(*shape, f"liger.{name}")] for name in ("cutile", "cute", "triton")]
        assert liger[number] == max(each for each in kernels if each is not None)


NAUGHTY = "<b id=bold>a & b</b>"


def make_results():
    """Three shapes in bfloat16, where the peer is faster at one, and no peer in float32."""
    records = []
    for rows, us in ((8, 90.0), (16, 1200.0), (32, 200.0)):
        records.append(make_record(rows=rows, settings="team width=1024"))
        records.append(make_record(us, rows=rows, provider=NAUGHTY))
    failed = make_record(None, rows=64, error="ValueError: <i>broken</i>")
    return [make_result(*records, failed), make_result(make_record(dtype="float32"))]


def written(folder, *results):
    pytest.importorskip("plotly", reason="plotly is not installed")
    html_report.write(results, folder / "report.html")
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return written(tmp_path_factory.mktemp("report"), *make_results())


def tables_of(page):
    """The cells of each sortable table by their column."""
    found = {}
    for name, table in re.findall(r'<table class="sortable" id="(\w+)">(.*?)</table>', page, re.DOTALL):
        headers = re.findall(r'<button type="button">(.*?)</button></th>', table)
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", html.unescape(row)) for row in table.split("<tr>")[2:]]
        found[name] = dict(zip(headers, map(list, zip(*rows, strict=True)), strict=True))
    return found


def plots_of(page):
    """The traces and the layout of each plot."""
    decode, plots = json.JSONDecoder().raw_decode, []
    for start in re.finditer(r'Plotly\.newPlot\(\s*"[^"]*",\s*', page):
        traces, end = decode(page, start.end())
        plots.append((traces, decode(page, page.index("{", end))[0]))
    return plots


def legend_of(page):
    [(traces, layout)] = plots_of(page)
    assert layout["showlegend"], "plotly hides the legend of one trace"
    return [each["name"] for each in traces]


def test_the_plots_hold_what_was_measured(page):
    rates, ratios, other_rates = plots_of(page)  # rates of both dtypes, ratios of one
    bars, markers, copy = rates[0]
    assert (bars["type"], bars["x"], markers["mode"]) == ("bar", [3.9, 7.8, 15.6], "markers")
    assert bars["y"] == markers["y"] == ["8 x 1024", "16 x 1024", "32 x 1024"], "not the one that failed"
    assert copy["name"] == "device copy" and [each["x0"] for each in rates[1]["shapes"]] == [3009.0]
    assert [trace["x"] for trace in ratios[0]] == [[0.9, 12.0, 2.0]]
    assert [trace["name"] for trace in other_rates[0]] == ["cutile", "device copy"]


def test_tables_are_sorted_by_numbers(page):
    """A script at the page's end sorts; cells without a figure stay last."""
    assert tables_of(page)["ratios"]["cutile / best peer"] == ["0.90", "12.00", "2.00"]
    assert 'data-value="12.0">12.00<' in page and 'data-value="">failed<' in page
    numbers = re.findall(r'<th class="number"><button type="button">(.*?)<', page)
    assert {"cutile / best peer", "us (median)", "spread", "rows"} <= {*numbers} and "provider" not in numbers
    script = page.rpartition("</table>")[2]
    assert 'querySelectorAll("table.sortable")' in script and 'addEventListener("click"' in script


def test_one_provider_has_a_legend_and_its_figures_in_a_table(tmp_path):
    records = [
        make_record(9.5, rows=8, provider="torch", us_p10=9.0, us_p90=10.0, gb_per_s=3.25),
        make_record(100.0, rows=64, provider="torch", copy_fraction=0.5),
    ]
    text = written(tmp_path, make_result(*records))
    assert legend_of(text) == ["torch", "device copy"]
    assert tables_of(text) == {
        "measurements": {
            "dtype": ["bfloat16", "bfloat16"],
            "op": ["backward", "backward"],
            "rows": ["8", "64"],
            "columns": ["1024", "1024"],
            "provider": ["torch", "torch"],
            "us (median)": ["9.5", "100.0"],
            "spread": ["±5%", "±0%"],
            "GB/s": ["3.2", "31"],
            "share of copy": ["66%", "50%"],
            "host us": ["29", "29"],
        }
    }
    assert "No ratio: at no shape were both cutile and a peer measured on a GPU." in text


def test_a_page_without_a_gpu_has_no_ratio(tmp_path):
    """An interpreter and a peer measured at one shape have none either."""
    none = {"copy_fraction": None, "host_us": None}
    records = [make_record(provider=name, **none) for name in ("cutile", "F.rms_norm")]
    result = make_result(*records, gpu=None, note=report.CPU_NOTE, copy_gb_per_s=None)
    text = written(tmp_path, result)
    assert legend_of(text) == ["cutile", "F.rms_norm"]
    assert list(tables_of(text)) == ["measurements"]
    assert not {"share of copy", "host us"} & set(tables_of(text)["measurements"]), "nothing stands there"
    assert "best peer, " not in text, "neither the headline nor the plot's axis"
    assert "No ratio: " in text and text.index(report.CPU_NOTE) < text.index("<table")


def test_one_provider_alone_has_a_legend_without_a_copy_rate(tmp_path):
    result = make_result(make_record(provider="torch"), gpu=None, copy_gb_per_s=None)
    assert legend_of(written(tmp_path, result)) == ["torch"]


def test_names_are_text(page):
    """Tables and plots escape them: plotly takes text for HTML."""
    assert NAUGHTY in tables_of(page)["measurements"]["provider"]
    assert html.escape(NAUGHTY) in [trace.get("name") for traces, _ in plots_of(page) for trace in traces]
    assert "<b id=bold>" not in page and "<i>broken" not in page


def test_the_page_needs_no_network_and_names_machine_and_versions(page):
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", page)
    assert "plotly.js v" in page[: page.index("<body>")]
    body = page[page.index("<body>") :]
    for fact in ("NVIDIA H100 80GB HBM3", "580.1", "13.4.92", "2.11.0", "0123456789ab", "3009 GB/s"):
        assert f"<td>{fact}</td>" in body, fact
    assert body.count("<tr><th>GPU</th>") == 1, "one machine, two dtypes"


def test_results_of_two_gpus_say_which_is_which(tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    for name, gpu in (("a", "NVIDIA H100"), ("b", "NVIDIA H200")):
        report.write_json(make_result(make_record(), gpu=gpu), tmp_path / f"{name}.json")
    html_report.main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path / "it.html")])
    text = (tmp_path / "it.html").read_text()
    assert "<title>RMSNorm benchmark: NVIDIA H100, NVIDIA H200</title>" in text
    assert "<h3>backward, bfloat16, NVIDIA H200</h3>" in text
    assert "<td>NVIDIA H100 (bfloat16, NVIDIA H100)<br>NVIDIA H200 (bfloat16, NVIDIA H200)</td>" in text
    assert "<tr><th>driver</th><td>580.1</td></tr>" in text


def test_what_is_no_result_is_refused(tmp_path, capsys):
    (tmp_path / "train-llama-1b-eager.json").write_text('{"trained": []}')
    with pytest.raises(SystemExit, match="2"):
        html_report.main([str(tmp_path / "train-llama-1b-eager.json")])
    assert "expected a result with records, got" in capsys.readouterr().err


def test_only_writing_needs_plotly(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["html_report.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(html_report.__file__, run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: python -m bench.report.html_report ")

    report.write_json(make_result(make_record()), tmp_path / "a.json")
    with pytest.raises(SystemExit) as end:
        html_report.main([str(tmp_path / "a.json"), "--out", str(tmp_path / "it.html")])
    assert end.value.code == f"plotly is not installed. To install it: {remedy()}"
    assert not (tmp_path / "it.html").exists()
