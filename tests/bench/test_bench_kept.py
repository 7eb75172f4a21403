# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The gate on the results that are kept: what they say again passes, and a tenth more of any cell fails."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from bench_records import make_record, make_result

from bench import gate
from bench.measure import shapes
from bench.measure.provenance import RESULTS, ROOT, gpu_slug, kept_in
from bench.report import readme, tables
from bench.report.pictures import MOST_BYTES

GPUS = list(dict.fromkeys(result["gpu"] for _, result in kept_in()))
KINDS = [(gpu, kind) for gpu in GPUS for kind in dict.fromkeys(map(shapes.kind_of, gate.load_kept(gpu)))]
EVERY_KIND = pytest.mark.parametrize(
    ("gpu", "kind"), KINDS, ids=[f"{gpu_slug(gpu)}-{kind}" for gpu, kind in KINDS]
)
SHIPPED = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]  # of which README shows figures


def newest(gpu, kind="models"):
    """One result of this GPU model and kind, with the newest kept figure of each cell of this package's kernels."""
    kept = [each for each in gate.load_kept(gpu) if shapes.kind_of(each) == kind]
    records = {shapes.cell_of(each): each for result in kept for each in result["records"] if each["us"]}
    ours = [each for cell, each in records.items() if cell[-1] in gate.GATED_PROVIDERS]
    return {**kept[-1], "records": ours}


def slowed(result, cells, factor):
    """The result, were these cells slower by a factor."""
    records = [
        {**each, "us": each["us"] * (factor if shapes.cell_of(each) in cells else 1)}
        for each in result["records"]
    ]
    return {**result, "records": records}


@pytest.mark.parametrize("gpu", SHIPPED)
def test_every_shape_op_and_dtype_is_kept(gpu):
    assert len({shapes.cell_of(each) for each in newest(gpu)["records"]}) >= 29 * 2 * 3


def test_kept_results_pass_and_a_tenth_more_fails(tmp_path, capsys):
    """CI's benchmark job ends with this command."""
    result, path = newest(SHIPPED[0]), tmp_path / "new.json"
    cells = {shapes.cell_of(each) for each in result["records"]}
    for factor, failed in ((1.0, 0), (1.1, len(cells))):
        tables.write_json(slowed(result, cells, factor), path)
        assert gate.main([str(path)]) == (1 if failed else 0)
        text = f"{len(cells)} cells compared on {result['gpu']}, {failed} failed, 0 not run"
        assert text in capsys.readouterr().out


@EVERY_KIND
def test_one_cell_that_takes_a_tenth_more_is_found(gpu, kind):
    result = newest(gpu, kind)
    kept = [each for each in gate.load_kept(gpu) if shapes.kind_of(each) == kind]
    for record in result["records"]:
        cell = shapes.cell_of(record)
        [line] = gate.compare(slowed(result, {cell}, 1.1), kept, accepted=gate.ACCEPTED).failed
        assert "{4} {0} {1}x{2} {3}".format(*cell) in line and "+10.0%" in line


# What counts as kept


def test_only_what_is_kept_counts(tmp_path):
    """Files that git ignores do not count: each of these folders was taken for a GPU's."""
    h100, h200 = SHIPPED
    for name, result in {
        f"{gpu_slug(h100)}/2026-11-20-float32": make_result(make_record()),
        "cpu/2026-11-20-bfloat16": make_result(make_record(), gpu=None),
        "ci/2026-11-20-bfloat16": make_result(make_record(), gpu=h200),
        f"partial/{gpu_slug(h200)}/2026-11-20-bfloat16": make_result(make_record(), gpu=h200),
        f"{gpu_slug(h200)}/2026-11-20-bfloat16-grid": make_result(make_record(), gpu=h200, is_grid=True),
    }.items():
        tables.write_json(result, tmp_path / f"{name}.json")
    for name, text in {"train": '{"gpu": "NVIDIA H200", "runs": []}', "list": "[]"}.items():
        (tmp_path / gpu_slug(h200) / f"{name}.json").write_text(text)
    (tmp_path / "ci" / "cut.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("")
    assert len(gate.load_kept(h100, tmp_path)) == 1 and gate.load_kept(h200, tmp_path) == []
    assert gate.load_kept(h100, tmp_path / "none") == []
    tables.write_json(make_result(make_record(), gpu=h200), tmp_path / gpu_slug(h200) / "2026-11-21.json")
    assert len(gate.load_kept(h200, tmp_path)) == 1


def test_a_damaged_kept_result_is_an_error(tmp_path):
    """Leaving it out made the gate pass whatever was run."""
    new = tmp_path / "new.json"
    path = tmp_path / gpu_slug(SHIPPED[0]) / "2026-11-20-split.json"
    for each in (new, path):
        tables.write_json(make_result(make_record()), each)
    path.write_text(path.read_text()[:200])
    for read in (
        lambda: gate.main([str(new), "--results", str(tmp_path)]),
        lambda: readme.newest_by_gpu(tmp_path, "-split.json"),
    ):
        with pytest.raises(ValueError, match=f"{path}: expected a result in JSON, got "):
            read()


# What is kept


def kind_of(path, result):
    """The shapes of models, a grid, ops of a transformer block, and the dtype; of a study its file's name without the
    date."""
    if "records" not in result:
        return path.stem.lstrip("0123456789-"), None
    return shapes.kind_of(result), result["records"][0]["dtype"]


def pictures_shown():
    """The pictures that README.md, the pages of docs/ and those of kept results show."""
    of_results = (path.with_suffix(".md") for path in readme.kept_results(RESULTS))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *of_results):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8")):
            yield Path(os.path.normpath(page.parent / target))


def test_the_newest_of_each_kind_and_what_pages_show_is_kept_and_nothing_else():
    """Old results and pictures that no page shows made a clone large. What a run has just written is not kept yet."""
    listed = subprocess.run(["git", "ls-files", "."], cwd=RESULTS, capture_output=True, text=True)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    there = {RESULTS / name for name in listed.stdout.splitlines()}
    newest: dict[tuple[object, ...], tuple[str, Path]] = {}
    for path in there:
        if path.suffix == ".json":
            result = json.loads(path.read_text())
            key = path.parent, kind_of(path, result)
            newest[key] = max(newest.get(key, ("", path)), (result["date"], path))
    kept = {path for _, path in newest.values()}
    of_runs = [path for path in kept if "records" in json.loads(path.read_text())]
    kept |= {path.with_suffix(suffix) for path in of_runs for suffix in (".csv", ".md")}
    kept |= {path for path in pictures_shown() if path.is_relative_to(RESULTS)}
    assert there == kept | {RESULTS / "README.md"}
    large = [path.name for path in there if path.suffix == ".png" and path.stat().st_size > MOST_BYTES]
    assert not large
