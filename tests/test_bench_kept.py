# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The gate on the results that are kept: what they say again passes, and a tenth more of any cell fails."""

import json

import pytest

from bench import gate, report
from bench.provenance import RESULTS

FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())


def newest(folder):
    """One result of this GPU model, with the newest kept figure of each cell of this package's kernels."""
    gpu = json.loads(next(folder.glob("*-bfloat16.json")).read_text())["gpu"]
    kept = gate.load_kept(gpu)
    records = {gate.cell_of(each): each for result in kept for each in result["records"] if each["us"]}
    ours = [each for cell, each in records.items() if cell[-1] in gate.GATED_PROVIDERS]
    return {**kept[-1], "records": ours}


def slowed(result, cells, factor):
    """The result, were these cells slower by a factor."""
    records = [
        {**each, "us": each["us"] * (factor if gate.cell_of(each) in cells else 1)}
        for each in result["records"]
    ]
    return {**result, "records": records}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_kept_results_pass_and_a_tenth_more_fails(folder, tmp_path, capsys):
    """By the command that CI's benchmark job ends with."""
    result, path = newest(folder), tmp_path / "new.json"
    cells = {gate.cell_of(each) for each in result["records"]}
    assert len(cells) >= 29 * 2 * 3, "shapes, ops and dtypes"
    for factor, failed in ((1.0, 0), (1.1, len(cells))):
        report.write_json(slowed(result, cells, factor), path)
        assert gate.main([str(path)]) == (1 if failed else 0)
        text = f"{len(cells)} cells compared on {result['gpu']}, {failed} failed, 0 not run"
        assert text in capsys.readouterr().out


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_one_cell_that_takes_a_tenth_more_is_found(folder):
    result = newest(folder)
    kept = gate.load_kept(result["gpu"])
    for record in result["records"]:
        cell = gate.cell_of(record)
        [line] = gate.compare(slowed(result, {cell}, 1.1), kept, accepted=gate.ACCEPTED).failed
        assert "{4} {0} {1}x{2} {3}".format(*cell) in line and "+10.0%" in line
