# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The page of a result of a transformer block, and the table of docs/performance.md."""

from __future__ import annotations

import pytest
from bench_records import assert_golden, cell, make_block, make_record

from bench.block.families import BLOCK_OPS, CONTROLS, FAMILIES, TOKENS
from bench.measure.provenance import RESULTS, gpu_slug
from bench.measure.shapes import kind_of
from bench.report import block as block_page
from bench.report import readme


def test_the_page_of_a_result():
    """Ratios to the best peer and to the op without, rows by shape, heads as maps, settings; means of several GPUs."""
    records = [
        *cell(100.0, 150.0, "bias_forward", copy_fraction=0.9449),
        *cell(100.0, 90.0, "bias_forward", rows=8),
    ]
    records.append(make_record(120.0, op="bias_forward", provider="torch.compile"))
    records += [make_record(98.0, op="no_bias_forward"), make_record(101.0, op="no_bias_forward", rows=8)]
    records.append(make_record(None, op="bias_backward", rows=8))
    for heads, size, share in ((32, 128, 0.93), (8, 128, 0.8), (8, 64, 0.7)):
        shape = {"rows": TOKENS * heads, "cols": size, "copy_fraction": share}
        records += cell(100.0, 100.0 + size, "qk_norm_forward", "torch.compile", **shape)
        records.append(make_record(100 * share, op="contiguous_forward", **shape))
    for op in BLOCK_OPS:
        if op not in CONTROLS.values() and not any(each["op"] == op and each["us"] for each in records):
            records += cell(100.0, 110.0, op, rows=TOKENS * 8, cols=64, settings=f"some_kernel of {op}")
    result, other = make_block(*records), make_block(*cell(100.0, 120.0, "bias_forward"), gpu="NVIDIA H200")
    assert_golden(
        "\n\n".join([*block_page.page_parts(result), block_page.overview([result, other])]), "block.txt"
    )


def test_without_results_there_is_no_section(tmp_path):
    page, empty = tmp_path / "page.md", "a\n<!-- block:begin -->\n<!-- block:end -->\nb\n"
    page.write_text(empty.replace("<!-- block:end", "\nold\n\n<!-- block:end"))
    readme.refresh(page, "block", block_page.overview([]))
    assert page.read_text() == empty


def of_block():
    return [each for each in readme.load(readme.kept_results(RESULTS)).values() if kind_of(each) == "block"]


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
