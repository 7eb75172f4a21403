# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What docs/performance.md shows of the ops of a transformer block."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from bench_records import make_block, make_record

from bench import gate
from bench.block import families as block
from bench.block import page as block_page
from bench.block import targets as block_targets
from bench.block.families import CONTROLS, FAMILIES
from bench.measure.provenance import RESULTS, ROOT, gpu_slug
from bench.report import readme
from bench.report import tables as report

H100 = "NVIDIA H100 80GB HBM3"
TOKENS = block.TOKENS


def of_both(us, peer, op, name="quack", **changes):
    return [make_record(us, op=op, **changes), make_record(peer, op=op, provider=name, **changes)]


def cells_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_without_results_there_is_no_section(tmp_path):
    assert block_page.section([]) == ""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- block:begin -->\n\nold\n\n<!-- block:end -->\nb\n")
    readme.refresh(page, "block", "")
    assert page.read_text() == "a\n<!-- block:begin -->\n<!-- block:end -->\nb\n"
    readme.refresh(page, "block", "new")
    assert page.read_text() == "a\n<!-- block:begin -->\n\nnew\n\n<!-- block:end -->\nb\n"


def test_means_are_to_the_best_peer_and_to_the_op_without():
    records = of_both(100.0, 90.0, "bias_forward", rows=8) + of_both(100.0, 160.0, "bias_forward")
    records.append(make_record(150.0, op="bias_forward", provider="torch.compile"))
    records += [make_record(99.0, op="no_bias_forward", rows=8), make_record(101.0, op="no_bias_forward")]
    records += of_both(50.0, 60.0, "residual_forward")
    assert cells_of(block_page.means_table(make_block(*records))) == [
        ["residual_forward", "the best peer", "1", "1.20", "1.200", "4096 x 1024"],
        ["bias_forward", "the best peer", "2", "1.16", "0.900", "8 x 1024"],
        ["bias_forward", "itself without bias", "2", "1.00", "0.990", "8 x 1024"],
    ]


def test_a_line_for_each_shape_of_rows():
    records = of_both(100.0, 150.0, "bias_backward", gb_per_s=2876.4, copy_fraction=0.9449)
    records.append(make_record(98.0, op="no_bias_backward"))
    records.append(make_record(None, op="bias_backward", rows=8))
    records += of_both(10.0, 12.0, "frozen_weight_backward", copy_fraction=None)
    assert cells_of(block_page.rows_table(make_block(*records))) == [
        ["bias_backward", "4096 x 1024", "2876", "94.5%", "quack", "1.50", "0.980"],
        ["frozen_weight_backward", "4096 x 1024", "2000", "", "quack", "1.20", ""],
    ]


def test_heads_are_maps_of_h_and_d():
    records = []
    for heads, size, share in ((32, 128, 0.93), (8, 128, 0.8), (8, 64, 0.7)):
        shape = {"rows": TOKENS * heads, "cols": size}
        records += of_both(
            100.0, 100 + size, "qk_norm_forward", "torch.compile", copy_fraction=share, **shape
        )
        records.append(make_record(100 * share, op="contiguous_forward", **shape))
    text = block_page.section([make_block(*records)])
    rates, ratios = re.findall(r"(?m)^\| heads.*\n(?:\|.*\n?)+", text)
    assert [cell.strip() for cell in rates.splitlines()[0].split("|")[1:-1]] == ["heads", "D = 64", "D = 128"]
    assert cells_of(rates.strip()) == [["8", "2000 (70.0%)", "2000 (80.0%)"], ["32", "", "2000 (93.0%)"]]
    assert cells_of(ratios.strip()) == [["8", "0.70 / 1.64", "0.80 / 2.28"], ["32", "", "0.93 / 2.28"]]


def test_a_result_of_every_op_is_shown_whole():
    records = []
    for family in FAMILIES:
        for op in family.ops:
            for rows, cols in family.shapes:
                records.append(
                    make_record(100.0, op=op, rows=rows, cols=cols, settings=f"some_kernel of {op}")
                )
                if op not in CONTROLS.values():
                    shape = {"rows": rows, "cols": cols}
                    records.append(make_record(110.0, op=op, provider="torch.compile", **shape))
    result = make_block(*records)
    text = block_page.section([result, make_block(*records, gpu="NVIDIA H200")])
    assert text.startswith("## A transformer block\n") and text.count("\n### ") == 2
    assert text.count("<details>") == text.count("</details>")
    for op in block.BLOCK_OPS:
        assert (f"some_kernel of {op}" in text) == (op not in CONTROLS.values()), op
    assert text.count("met ") >= len(block_targets.targets(result)) - 4, "targets stand on the page"
    assert "| 40" in text and "D = 256" in text and "itself without strides" in text


def test_the_settings_of_cutile_are_named():
    records = [
        make_record(1.0, op="bias_forward", settings="forward_rows width=64"),
        *of_both(1, 1, "bias_backward"),
    ]
    assert cells_of(block_page.settings_table(make_block(*records)))[0] == [
        "bias_forward",
        "4096 x 1024",
        "forward_rows width=64",
    ]


def test_pages_are_brought_up_to_date_from_a_run(tmp_path, monkeypatch):
    """The benchmark itself writes what the pages are made of; no GPU is needed for that."""
    command = [sys.executable, "-m", "bench.run", "--block", "--quick", "--provider", "torch"]
    options = ["--op", "residual_forward,qk_norm", "--out", str(tmp_path / "out")]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)
    [path] = (tmp_path / "out").glob("*-bfloat16-block.json")
    result = json.loads(path.read_text())
    ours = [each | {"provider": "cutile"} for each in result["records"]]
    others = [each | {"provider": "F.rms_norm", "us": each["us"] * 2} for each in result["records"]]
    kept = tmp_path / "results" / gpu_slug(H100) / path.name
    report.write_json(result | {"gpu": H100, "records": ours + others}, kept)
    assert readme.kept_results(tmp_path / "results") == [kept]
    text = readme.page_sections(readme.load([kept]))["block"]
    assert text.count("2.00") >= 3 and "| residual_forward | 32 x 128" in text
    assert f"### {H100}, bfloat16, of a transformer block" in text and "48 x 16" in text


def of_block():
    return [
        each for each in readme.load(readme.kept_results(RESULTS)).values() if gate.kind_of(each) == "block"
    ]


@pytest.mark.parametrize("result", of_block(), ids=lambda result: gpu_slug(result["gpu"]))
def test_kept_results_are_whole(result):
    """Every op at each of its shapes, and which kernel served."""
    found = {
        (each["op"], each["rows"], each["cols"]): each
        for each in result["records"]
        if each["provider"] == "cutile"
    }
    assert set(found) == {(op, *shape) for family in FAMILIES for op in family.ops for shape in family.shapes}
    assert all(each["us"] and each["settings"] for each in found.values())
    assert {"quack", "torch.compile", "liger.triton"} <= {each["provider"] for each in result["records"]}
