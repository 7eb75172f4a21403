# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""report.html: what stands in its tables and plots, and that it needs nothing else."""

from __future__ import annotations

import html
import json
import re
import runpy
import sys

import pytest
from bench_records import make_record, make_result

from bench import remedy
from bench.report import html_report
from bench.report import tables as report

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
    (tmp_path / "train.json").write_text('{"runs": []}')
    with pytest.raises(SystemExit, match="2"):
        html_report.main([str(tmp_path / "train.json")])
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
