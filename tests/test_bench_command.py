# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's command: what it takes, where its results go."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
from test_bench_records import RECORD_FIELDS

from bench import readme, run
from bench.peers import ALL_PROVIDERS
from bench.provenance import RESULTS, ROOT


def run_command(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)


def test_one_command_measures_and_writes(tmp_path):
    done = run_command(
        *("bash", str(ROOT / "bench" / "run.sh"), "--quick", "--shapes", "4x16,3x7", "--provider", "torch"),
        *("--out", str(tmp_path)),
        PYTHON=sys.executable,
        TILEGYM_RMSNORM_COMMIT="feedbeef",
    )
    assert done.returncode == 0, done.stderr
    assert "Not GPU figures" in done.stdout and "4 x 16" in done.stdout
    (path,) = tmp_path.glob("*-bfloat16.json")
    result = json.loads(path.read_text())
    assert result["gpu"] is None and result["note"] and result["commit"] == "feedbeef"
    assert {"driver", "cuda", "tileiras", "versions", "dirty", "date", "copy_gb_per_s"} <= set(result)
    assert [(record["op"], record["rows"]) for record in result["records"]] == [
        (op, m) for m in (4, 3) for op in ("forward", "backward", "both")
    ]
    assert all(set(record) == RECORD_FIELDS and record["us"] > 0 for record in result["records"])
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".csv", ".png"}


def test_unknown_provider_is_refused(tmp_path):
    done = run_command(sys.executable, "-m", "bench.run", "--provider", "torhc", "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"expected some of {', '.join(ALL_PROVIDERS)}, got torhc" in done.stderr


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ((), "nvidia-h200"),
        (("--dtype", "float32", "--p-rows"), "nvidia-h200"),
        (("--op", "both,forward,backward,dx"), "nvidia-h200"),
        (("--peers",), "nvidia-h200"),
        (("--grid",), "nvidia-h200"),
        (("--quick",), "partial/nvidia-h200"),
        (("--shapes", "4x4"), "partial/nvidia-h200"),
        (("--op", "both"), "partial/nvidia-h200"),
        (("--provider", "cutile"), "partial/nvidia-h200"),
    ],
)
def test_part_of_a_run_does_not_replace_kept_results(options, folder):
    assert run.default_folder(run.parse_arguments(list(options)), "NVIDIA H200") == RESULTS / folder


def test_git_ignores_parts_of_runs_and_not_whole_ones():
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse"], capture_output=True).returncode != 0:
        pytest.skip("not a git checkout")
    for folder, status in (("partial/nvidia-h200", 0), ("nvidia-h200", 1)):
        command = [
            "git",
            "-C",
            str(ROOT),
            "check-ignore",
            "-q",
            f"bench/results/{folder}/2026-11-21-bfloat16.json",
        ]
        assert subprocess.run(command).returncode == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4x"], "argument --shapes: expected ROWSxCOLS,... with both at least 1, got '4x'"),
        (["--readme", "nope.json"], "argument --readme: expected a result in JSON, got nope.json"),
        (["--readme", str(ROOT / "ci.yaml")], "argument --readme: expected a result in JSON, got"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_readme_takes_only_results_of_the_repository(tmp_path):
    result = tmp_path / "result.json"
    result.write_text('{"records": []}')
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file under"):
        readme.result_file("records")(str(result))
    with pytest.raises(argparse.ArgumentTypeError, match="expected a result with runs"):
        readme.result_file("runs")(str(result))


@pytest.mark.parametrize(("providers", "is_given"), [("torch,inductor", True), ("torch,F.rms_norm", False)])
def test_the_process_that_measures_gives_inductor_its_timer(monkeypatch, providers, is_given):
    """Before anything is compiled there."""
    events = []

    class Stop(Exception):
        pass

    def bench(*_):
        events.append("measures")
        raise Stop

    monkeypatch.setattr(run.inductor, "time_by_device", lambda: events.append("timer"))
    monkeypatch.setattr(run, "Bench", bench)
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    with pytest.raises(Stop):
        run.main(["--provider", providers, "--shapes", "4x8"])
    assert events == ["timer", "measures"][not is_given :]
