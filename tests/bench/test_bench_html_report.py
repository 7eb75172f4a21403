# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""report.html, as a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from bench_records import make_record, make_result

from bench import html_report, report

pytest.importorskip("plotly", reason="plotly is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAUGHTY = "<b id=bold>a & b</b>"

# Put into a copy of the page: what happened there, as text that --dump-dom shows.
PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => {
  const click = (name) => [...document.querySelectorAll("#cells button")]
    .find((each) => each.textContent === name).click();
  const column = (at) => [...document.querySelectorAll("#cells tbody tr")].map((row) => row.cells[at].textContent);
  const ratio = 4;
  const found = { before: column(ratio) };
  click("cutile / best peer");
  found.down = column(ratio);
  click("cutile / best peer");
  found.up = column(ratio);
  click("best peer");
  found.names = column(ratio + 1);
  setTimeout(() => {
    found.plots = document.querySelectorAll(".plotly-graph-div").length;
    found.markers = document.querySelectorAll(".scatterlayer .trace .point").length;
    found.bars = document.querySelectorAll(".barlayer .trace .point").length;
    found.legend = [...document.querySelectorAll(".legendtext")].map((each) => each.textContent);
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    html_report.write(make_results(), path)
    return path


@pytest.fixture(scope="module")
def shown(page):
    """What the probe found in a browser of a phone's width."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome")
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("<head>", f"<head>{PROBE}", 1))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=500,900", "--dump-dom"]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def test_the_plots_are_drawn_without_an_error(shown):
    assert shown["errors"] == []
    assert shown["plots"] == 3, "rates of both dtypes, ratios of one"
    assert shown["markers"] == 3 and shown["bars"] == 3 + 3 + 1
    assert shown["widest"] <= 500, "nothing is wider than the window"


def test_a_click_on_a_header_sorts_the_table(shown):
    assert shown["before"] == ["0.90", "12.00", "2.00", "", ""]
    assert shown["down"] == ["12.00", "2.00", "0.90", "", ""], "not as text"
    assert shown["up"] == ["0.90", "2.00", "12.00", "", ""], "what has none stays last"


def test_names_are_text(shown, page):
    assert NAUGHTY in shown["names"] and NAUGHTY in shown["legend"]
    assert not shown["bold"] and "<i>broken" not in page.read_text()


def test_the_page_needs_no_network_and_names_machine_and_versions(page):
    text = page.read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", text)
    body = text[text.index("<body>") :]
    for fact in ("NVIDIA H100 80GB HBM3", "580.1", "13.4.92", "2.11.0", "0123456789ab", "3009 GB/s"):
        assert f"<td>{fact}</td>" in body, fact
    assert body.count("<tr><th>GPU</th>") == 1, "one machine, two dtypes"


def test_results_of_two_gpus_say_which_is_which(tmp_path):
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
