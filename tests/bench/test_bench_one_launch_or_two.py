# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The study of one launch or two, and its kept results."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from bench_records import make_result

from bench.measure.check import make_inputs
from bench.measure.provenance import RESULTS
from bench.measure.session import ContextLostError, this_device
from bench.report import readme
from bench.studies import one_launch_or_two as study
from tilegym_rmsnorm.backends import registry


def test_every_shape_is_kept():
    for result in readme.newest_by_gpu(RESULTS, "-split.json"):
        assert [(cell["rows"], cell["cols"]) for cell in result["cells"]] == study.SHAPES


def test_a_wrong_plan_is_found_and_not_timed(tmp_path, monkeypatch, capsys):
    """The whole command and the kernels, without a GPU in the interpreter: of a cell's rows they get four."""
    launch = pytest.importorskip("tilegym_rmsnorm.backends.cutile.launch", exc_type=ImportError)
    from cutile_runs import set_launcher

    class WrongWhereSlabsHave512Rows(launch.Launcher):
        def __call__(self, *arguments):
            dx, d_residual, dw, db = super().__call__(*arguments)
            return dx, d_residual, dw * 1.1 if getattr(self.plan.first, "slab", 0) == 512 else dw, db

    set_launcher(monkeypatch, "Backward", WrongWhereSlabsHave512Rows)
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(registry, "why_unusable", lambda backend: None)
        monkeypatch.setattr(study, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(study, "make_inputs", lambda shape, *rest: make_inputs((4, shape[1]), *rest))
    monkeypatch.setattr(study, "describe_run", make_result)
    monkeypatch.setattr(study, "SHAPES", [(1040, 16)])
    assert study.main(["--out", str(tmp_path / "new")]) == 1
    [path] = (tmp_path / "new").iterdir()
    [cell] = json.loads(path.read_text())["cells"]
    [split], selected = cell["splits"], cell["selected"]
    wrong = {plan: us for plan, us in split["tried_us"].items() if "slab=512" in plan}
    assert len(split["tried_us"]) == 6 and len(wrong) == 2 and set(split["errors"]) == {"dx", "dw"}
    assert all(us.startswith("dw has a relative error of") for us in wrong.values())
    assert split["us"] == min(us for plan, us in split["tried_us"].items() if plan not in wrong)
    assert (
        selected["settings"].startswith("backward_tiles")
        and study.ratio(cell) == selected["us"] / split["us"]
    )
    out = capsys.readouterr().out
    assert out.count("failed: 1040x16 by backward_split") == 2 and f"written: {path}" in out


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert study.main(["--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == "nothing was measured: PyTorch sees no GPU\n" and not list(
        tmp_path.iterdir()
    )


class Losing:
    """Plans that lose the CUDA context at the second shape."""

    def __init__(self, session, shape, *_):
        self.shape = shape

    def measure(self, op):
        if self.shape == (1040, 32):
            raise ContextLostError("split", "illegal address")
        record = {"provider": "selected", "tried_us": None, "error": None}
        return record | {"us": 9.0}, record | {"us": None, "tried_us": {"a": 9.0, "b": "dw is wrong"}}


def test_a_lost_context_ends_the_run_with_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "why_unusable", lambda backend: None)
    monkeypatch.setattr(study, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(study, "choose_tables", lambda: None)  # which would write to the environment
    monkeypatch.setattr(study, "describe_run", make_result)
    monkeypatch.setattr(study, "Plans", Losing)
    monkeypatch.setattr(study, "SHAPES", [(1040, 16), (1040, 32), (1040, 64)])
    assert study.main(["--out", str(tmp_path)]) == 1
    [path] = tmp_path.iterdir()
    assert [cell["cols"] for cell in json.loads(path.read_text())["cells"]] == [16]
    out = capsys.readouterr().out
    assert "No cell has both times." in out and "failed: 1040x16 by b: dw is wrong" in out
    assert "failed: 1040x32: the CUDA context is lost, and the run ends: split: illegal address" in out


def test_a_cell_without_a_time_is_a_dash():
    cells = [
        {"rows": 8, "cols": cols, "selected": {"us": us}, "splits": [{"us": 10.0}]}
        for cols, us in ((16, 9.0), (32, None))
    ]
    text = study.section(make_result(cells=cells))
    assert re.search(r"\| 8 +\| +0.90 \| +- +\|", text) and "faster in 1 of 1 cells" in text


def test_a_split_by_the_users_tables_is_nothing_to_compare_with(monkeypatch):
    launch = pytest.importorskip("tilegym_rmsnorm.backends.cutile.launch", exc_type=ImportError)
    cell = study.Plans.__new__(study.Plans)
    cell.shape, cell.bench = (1040, 16), SimpleNamespace(device=this_device())
    few = cell.make_providers("split")[0].backward.args[0].plan
    monkeypatch.setattr(launch, "plan_for", lambda problem: few)
    with pytest.raises(
        ValueError, match="selected: expected two kernels to compare with, got backward_split"
    ):
        cell.make_providers("selected")
