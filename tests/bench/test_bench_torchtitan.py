# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The study of torchtitan 0.2.2's own trainer: tiny models on a CPU, in one process, in four, and as one rank alone."""

import json
import math

import pytest
import torch
from helpers import HAS_GPU
from processes import run_script
from titan_release import FOLDER, MISSING
from torch.torch_version import TorchVersion

from bench.measure.provenance import gpu_slug
from bench.report.tables import write_json
from bench.studies import torchtitan as study

needs_it = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import titan_imports  # for libraries that it imports besides
from bench.studies import torchtitan
{more}
status = torchtitan.main(sys.argv[1:])
if torchtitan.dist.is_torchelastic_launched():
    torchtitan.parallel.leave(status)
sys.exit(status)
"""
LARGE = "--model", "llama3-8b", "--tiny", "--mode"
# The two runs with the original norms are not the same, and only on ranks that are not the first.
OTHER_BITS = """
runs, bits = iter((0, 1, 0, 0)), torchtitan.measure.bits
def other(trainee):
    return [*bits(trainee), torchtitan.torch.tensor(next(runs) * torchtitan.dist.get_rank())]
torchtitan.measure.bits = other
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


@needs_it
@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="gloo, on a CPU")
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="FSDP2 by gloo does not end")
def test_four_processes_train_with_both_norms(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(RUN.format(more=OTHER_BITS))
    path = tmp_path / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script, str(FOLDER)]
    given = [*LARGE, "eager", "--fsdp", "2", "--tp", "2", "--out", str(path)]
    done = run_script(*launcher, *given, CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("written:") == 1, "the first rank alone writes"
    (case,) = json.loads(path.read_text())["cases"]
    assert (case["fsdp"], case["tp"], case["one_rank"], case["dtype"]) == (2, 2, False, "float32")
    theirs, ours = case["trained"]
    assert (theirs["patched"], ours["patched"]) == (0, 5)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert theirs["losses"][0] == pytest.approx(math.log(256), abs=1), "the mean of the tokens of all ranks"
    assert ours["same_bits"] is True
    assert theirs["same_bits"] is False, "one rank is enough"


@needs_it
@pytest.mark.slow
@pytest.mark.parametrize("mode", study.MODES)
def test_one_rank_trains_alone(mode, tmp_path):
    done, result = run(tmp_path, *LARGE, mode, "--fsdp", "4", "--tp", "2", "--one-rank")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    (case,) = result["cases"]
    assert (case["fsdp"], case["tp"], case["one_rank"]) == (4, 2, True)
    theirs, ours = case["trained"]
    assert (theirs["patched"], ours["patched"]) == (0, 5)
    assert all(map(math.isfinite, theirs["losses"] + ours["losses"])) and "same_bits" not in ours
    section = study.page_section(result)
    assert section in done.stdout and "fake process group" in section and "apart" not in section
    sizes = case["sizes"]
    seconds = sorted(theirs["step_s"])
    rate = sizes["batch"] * sizes["length"] / (seconds[4] + seconds[5]) * 2
    assert f"{rate:,.0f} " in section, "of one batch, not of four"


@pytest.mark.parametrize(
    ("given", "world", "error"),
    [
        (["--fsdp", "4", "--tp", "2"], "1", "expected 1 processes in all, got 4 x 2"),
        (["--fsdp", "4", "--tp", "2"], "4", "expected 4 processes in all, got 4 x 2"),
        (["--one-rank"], "1", "expected --fsdp or --tp beside it"),
        (["--one-rank", "--fsdp", "2"], "2", "expected one process, got 2"),
        (["--model", "llama3-8b"], "1", "llama3-8b needs --fsdp or --tp"),
        (["--model", "llama3-8b", "--tiny", "--tp", "0"], "1", "expected a whole number of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(given, world, error, capsys, monkeypatch):
    monkeypatch.setattr(study, "package_version", lambda name: "0.2.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit, match="^2$"):
        study.main(given)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], "-torchtitan.json"),
        (["--fsdp", "4", "--tp", "2"], "-torchtitan-fsdp4-tp2.json"),
        (["--fsdp", "4", "--tp", "2", "--one-rank"], "-torchtitan-fsdp4-tp2-one-rank.json"),
    ],
)
def test_results_are_named_by_how_they_ran(given, name):
    assert study.ending(study.make_parser().parse_args(given)) == name


def test_the_page_has_the_newest_result_of_each_kind(tmp_path):
    """Also of kinds of which there is none."""
    page, gpu = tmp_path / "page.md", "NVIDIA H200"
    (kept,) = study.RESULTS.glob("nvidia-h200/*-torchtitan.json")
    result = json.loads(kept.read_text())
    kinds = {"": {}, "-fsdp4-tp2": {"fsdp": 4, "tp": 2}}
    kinds["-fsdp4-tp2-one-rank"] = {"fsdp": 4, "tp": 2, "one_rank": True}
    sections = []
    for count, (kind, changes) in enumerate(kinds.items(), 1):
        for day in ("2026-12-04", "2026-12-03"):
            found = {**result, "gpu": gpu, "date": f"{day}T10:00:00+00:00"}
            found["cases"] = [{**case, **changes} for case in result["cases"][:2]]
            sections += [study.page_section(found)] if day == "2026-12-04" else []
            write_json(found, tmp_path / gpu_slug(gpu) / f"{day}-torchtitan{kind}.json", "cases")
        page.write_text("<!-- torchtitan:begin -->\nold\n<!-- torchtitan:end -->\n")
        assert study.refresh_page(page, tmp_path) == count
        shown = "\n\n".join(sections)
        assert page.read_text() == f"<!-- torchtitan:begin -->\n\n{shown}\n\n<!-- torchtitan:end -->\n"
    alone, spread, one_rank = sections
    assert "FSDP2 4" not in alone and "FSDP2 4, TP 2" in spread and "rank 0 of 8" not in spread
    assert "One GPU as rank 0 of 8" in one_rank and "far apart" not in one_rank
