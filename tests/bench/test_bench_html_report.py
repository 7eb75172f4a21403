# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""report.html, as a browser shows it."""

from __future__ import annotations

import html
import json
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from bench_records import make_record, make_result

from bench import remedy
from bench.report import html_report
from bench.report import tables as report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAUGHTY = "<b id=bold>a & b</b>"

# Put into a copy of the page: what happened there, as text that --dump-dom shows. CLICKS are of a table, a header that
# is clicked and one whose column is asked for after that.
PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => {
  const headers = (table) => [...document.querySelectorAll(`#${table} th`)].map((each) => each.textContent);
  const column = (table, name) => {
    const at = headers(table).indexOf(name);
    return [...document.querySelectorAll(`#${table} tbody tr`)].map((row) => row.cells[at].textContent);
  };
  const found = { tables: {}, clicked: [] };
  for (const { id } of document.querySelectorAll("table.sortable"))
    found.tables[id] = Object.fromEntries(headers(id).map((name) => [name, column(id, name)]));
  for (const [table, header, asked] of CLICKS) {
    document.querySelectorAll(`#${table} th button`)[headers(table).indexOf(header)].click();
    found.clicked.push(column(table, asked));
  }
  setTimeout(() => {
    found.text = document.body.innerText;
    found.plots = document.querySelectorAll(".plotly-graph-div").length;
    found.markers = document.querySelectorAll(".scatterlayer .trace .point").length;
    found.bars = document.querySelectorAll(".barlayer .trace .point").length;
    found.legend = [...document.querySelectorAll(".legendtext")].map((each) => each.textContent);
    found.drawn = [...document.querySelectorAll(".main-svg:first-child")].map((each) => each.clientWidth);
    found.widest = document.documentElement.scrollWidth;
    found.bold = document.getElementById("bold") !== null;
    found.errors = errors;
    const probe = document.createElement("pre");
    probe.id = "probe";
    probe.textContent = JSON.stringify(found);
    document.body.append(probe);
  }, 1000);
});
</script>"""


def make_results():
    """Three shapes in bfloat16, where the peer is faster at one, and no peer in float32."""
    records = []
    for rows, us in ((8, 90.0), (16, 1200.0), (32, 200.0)):
        records.append(make_record(rows=rows, settings="team width=1024"))
        records.append(make_record(us, rows=rows, provider=NAUGHTY))
    failed = make_record(None, rows=64, error="ValueError: <i>broken</i>")
    return [make_result(*records, failed), make_result(make_record(dtype="float32"))]


def written(folder, results):
    pytest.importorskip("plotly", reason="plotly is not installed")
    path = folder / "report.html"
    html_report.write(results, path)
    return path


def shown_in_browser(page, *clicks, width=500):
    """What the probe finds in a window of that many pixels; headless ones have 500 or more."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome")
    probe = PROBE.replace("CLICKS", json.dumps(clicks))
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("<head>", f"<head>{probe}", 1))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return written(tmp_path_factory.mktemp("report"), make_results())


@pytest.fixture(scope="module")
def shown(page):
    ratio = "cutile / best peer"
    clicks = [("ratios", ratio, ratio), ("ratios", ratio, ratio), ("ratios", "best peer", "best peer")]
    us = "us (median)"
    return shown_in_browser(page, *clicks, ("measurements", us, us), ("measurements", us, us))


def test_the_plots_are_drawn_without_an_error(shown):
    assert shown["errors"] == []
    assert shown["plots"] == 3, "rates of both dtypes, ratios of one"
    assert shown["markers"] == 3 and shown["bars"] == 3 + 3 + 1
    assert shown["widest"] <= 500, "nothing is wider than the window"


def test_a_click_on_a_header_sorts_its_table(shown):
    before = shown["tables"]["ratios"]["cutile / best peer"]
    down, up, names, us_down, us_up = shown["clicked"]
    assert before == ["0.90", "12.00", "2.00"]
    assert down == ["12.00", "2.00", "0.90"], "not as text"
    assert up == ["0.90", "2.00", "12.00"]
    assert names == [NAUGHTY] * 3
    assert us_down == ["1200.0", "200.0", "100.0", "100.0", "100.0", "100.0", "90.0", "failed"]
    assert us_up == [*us_down[-2::-1], "failed"], "what has no figure stays last"


def test_one_provider_has_a_legend_and_its_figures_in_a_table(tmp_path):
    records = [
        make_record(9.5, rows=8, provider="torch", us_p10=9.0, us_p90=10.0, gb_per_s=3.25),
        make_record(100.0, rows=64, provider="torch", copy_fraction=0.5),
    ]
    path = written(tmp_path, [make_result(*records)])
    found = shown_in_browser(path, ("measurements", "us (median)", "rows"), width=1280)
    assert found["errors"] == [] and found["widest"] <= 1280
    assert found["drawn"] == [1200], "all of the page's width, as no plot stands beside it"
    assert found["plots"] == 1 and found["legend"] == ["torch", "device copy"]
    assert found["tables"] == {
        "measurements": {
            "dtype": ["bfloat16", "bfloat16"],
            "op": ["backward", "backward"],
            "rows": ["8", "64"],
            "columns": ["1024", "1024"],
            "provider": ["torch", "torch"],
            "us (median)": ["9.5", "100.0"],
            "spread": ["±5%", "±0%"],
            "GB/s": ["3.2", "2000"],
            "share of copy": ["66%", "50%"],
            "host us": ["30", "30"],
        }
    }
    assert found["clicked"] == [["64", "8"]]
    assert "No ratio: at no shape were both cutile and a peer measured on a GPU." in found["text"]


def test_a_page_without_a_gpu_has_no_ratio(tmp_path):
    """Not even where an interpreter and a peer were measured at one shape."""
    none = {"copy_fraction": None, "host_us": None}
    records = [make_record(provider=name, **none) for name in ("cutile", "F.rms_norm")]
    result = make_result(*records, gpu=None, note=report.CPU_NOTE, copy_gb_per_s=None)
    found = shown_in_browser(written(tmp_path, [result]))
    assert found["errors"] == [] and found["plots"] == 1
    assert found["legend"] == ["cutile", "F.rms_norm"]
    assert list(found["tables"]) == ["measurements"]
    assert not {"share of copy", "host us"} & set(found["tables"]["measurements"]), "nothing stands there"
    assert "best peer, " not in found["text"], "neither the headline nor the plot's axis"
    assert "No ratio: " in found["text"]
    body = found["text"].split("Every measurement", 1)[1]  # behind the links
    assert body.strip().startswith(report.CPU_NOTE)


def test_one_provider_alone_has_a_legend_without_a_copy_rate(tmp_path):
    """plotly hides the legend of one trace."""
    result = make_result(make_record(provider="torch"), gpu=None, copy_gb_per_s=None)
    assert shown_in_browser(written(tmp_path, [result]))["legend"] == ["torch"]


def test_names_are_text(shown, page):
    assert NAUGHTY in shown["tables"]["measurements"]["provider"] and NAUGHTY in shown["legend"]
    assert not shown["bold"] and "<i>broken" not in page.read_text()


def test_the_page_needs_no_network_and_names_machine_and_versions(page):
    text = page.read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", text)
    body = text[text.index("<body>") :]
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
