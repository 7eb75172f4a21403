# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The study of torchtitan 0.2.2's own trainer: tiny models on a CPU."""

import json

import pytest
from processes import run_script
from titan_release import FOLDER, MISSING

from bench.studies import torchtitan as study

needs_it = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import titan_imports  # for libraries that it imports besides
from bench.studies import torchtitan
{more}
sys.exit(torchtitan.main(sys.argv[1:]))
"""
NOT_CONVERTED = """
from tilegym_rmsnorm.integrations.torchtitan_converter import NormConverter
NormConverter.convert = lambda self, model: None
"""
OTHER_EPS = """
from tilegym_rmsnorm.integrations.torchtitan_converter import NormConverter
def convert(self, model, before=NormConverter.convert):
    before(self, model)
    model.norm.eps = 1.0
NormConverter.convert = convert
"""


def run(tmp_path, *arguments, more=""):
    path = tmp_path / "result.json"
    given = [str(FOLDER), *arguments, "--out", str(path)]
    done = run_script("-c", RUN.format(more=more), *given, CUDA_VISIBLE_DEVICES="")
    assert path.exists(), done.stderr[-4000:]
    return done, json.loads(path.read_text())


@needs_it
def test_every_case_trains_with_both_norms(tmp_path):
    done, result = run(tmp_path, "--dtype", "float32")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert result["versions"]["torchtitan"] == "0.2.2" and result["commit"]
    assert [case["model"] for case in result["cases"]] == ["llama3, float32"] * 2 + ["qwen3, float32"] * 2
    assert [case["compiled"] for case in result["cases"]] == [False, True] * 2
    for case in result["cases"]:
        theirs, ours = case["trained"]
        assert (theirs["norm"], ours["norm"]) == tuple(study.WAYS)
        assert (theirs["patched"], ours["patched"]) == (0, 5 if "llama3" in case["model"] else 9)
        assert len({*theirs["losses"]}) == study.TINY_STEPS
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert len(theirs["step_s"]) == len(ours["step_s"]) >= 10
    section = study.page_section(result)
    assert section in done.stdout and section.count("| converter |") == 2


def test_another_release_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(study, "package_version", lambda name: "0.3.0")
    with pytest.raises(SystemExit, match="^2$"):
        study.main([])
    assert "expected torchtitan 0.2, which has model converters, got 0.3.0" in capsys.readouterr().err


@needs_it
@pytest.mark.parametrize(
    ("more", "error"),
    [(NOT_CONVERTED, "expected 0 and 5 patched norms"), (OTHER_EPS, "the first losses are")],
)
def test_norms_that_are_not_ours_or_not_right_fail(more, error, tmp_path):
    done, result = run(tmp_path, "--model", "llama3", "--dtype", "float32", "--mode", "eager", more=more)
    (case,) = result["cases"]
    (failed,) = case["trained"]
    assert done.returncode == 1 and error in failed["error"] and error in done.stdout
