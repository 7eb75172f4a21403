# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""ci.yaml is the one source of what continuous integration does: it is sound, `.ci/run` obeys it, GitHub calls that."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench import run
from bench.shapes import DEFAULT_SHAPES

ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / "ci.yaml").read_text())["jobs"]


def ci_run(*arguments: object) -> subprocess.CompletedProcess:
    """`.ci/run` with this interpreter, on a machine without a GPU."""
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / ".ci" / "run"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def job_file(tmp_path: Path):
    """Call it with {job: (needs, command)} to have a list of such jobs, with a limit of 3 seconds each, and with
    by_name=JOB for one that runs by name only."""

    def write(jobs: dict[str, tuple[str, str]], by_name: str = "") -> Path:
        entries = {
            name: {"needs": needs, "timeout_minutes": 0.05, "commands": [command]}
            | ({"by_name": True} if name == by_name else {})
            for name, (needs, command) in jobs.items()
        }
        path = tmp_path / "jobs.yaml"
        path.write_text(yaml.safe_dump({"jobs": entries}, sort_keys=False))
        return path

    return write


def test_jobs_and_what_they_need():
    assert {name: job["needs"] for name, job in JOBS.items()} == {
        "format": "nothing",
        "types": "nothing",
        "fast": "nothing",
        "cpu-tests": "nothing",
        "docs": "mkdocs",
        "build": "index",
        "every-config": "nothing",
        "torch-2-9": "nothing",
        "torch-2-11": "nothing",
        "torch-2-14": "nothing",
        "gpu-ops": "gpu",
        "benchmark": "gpu",
    }
    always = [job for job in JOBS.values() if job["needs"] != "gpu" and not job.get("by_name")]
    assert len(always) == 6 and sum(job["timeout_minutes"] for job in always) <= 75


def test_each_test_belongs_to_one_of_two_jobs():
    commands = [*JOBS["fast"]["commands"], *JOBS["cpu-tests"]["commands"]]
    assert commands == [
        f"CUDA_VISIBLE_DEVICES= tests/run.sh -m {marker}" for marker in ('"not slow"', "slow")
    ]


@pytest.mark.parametrize("command", [command for job in JOBS.values() for command in job["commands"]])
def test_every_command_exists(command):
    words = [word for word in command.split() if not re.match(r"\w+=", word)]
    if words[:2] == ["$PYTHON", "-m"]:
        if words[2] in ("mypy", "mkdocs"):
            pytest.importorskip(words[2], reason=f"{words[2]} is not installed")
        assert importlib.util.find_spec(words[2]) is not None
    elif words[0] == "$PYTHON":
        assert ast.parse((ROOT / words[1]).read_text(), words[1])
    elif "/" in words[0]:
        assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} is not an executable file"
        assert subprocess.run(["bash", "-n", ROOT / words[0]]).returncode == 0
    else:
        assert shutil.which(words[0])


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job["needs"] == "gpu"])
def test_gpu_jobs_fail_first_where_the_best_backend_does_not_work(name):
    assert JOBS[name]["commands"][0] == "$PYTHON -m tilegym_rmsnorm doctor"


def test_the_gate_gets_every_cell_of_cutile_that_is_kept():
    """Of five shapes a slowdown elsewhere, or in another dtype, would pass."""
    (command,) = [each for each in JOBS["benchmark"]["commands"] if each.startswith("bench/run.sh")]
    arguments = run.parse_arguments(command.split()[1:])
    assert run.default_shapes(arguments, has_gpu=True) == DEFAULT_SHAPES and arguments.shapes is None
    assert set(arguments.dtype) == set(run.DTYPES) and "cutile" in arguments.provider
    assert arguments.op is None or {"forward", "backward", "dx"} <= set(arguments.op)
    assert JOBS["benchmark"]["commands"][-1] == f"$PYTHON -m bench.gate {arguments.out}"


def test_github_calls_every_job_and_nothing_else():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }

    assert commands == {name: [f"bash .ci/run {name}"] for name in JOBS}
    assert all(re.fullmatch(r"[A-Za-z_][\w-]*", name) for name in JOBS), "GitHub refuses other names"
    kept = {
        name: step["with"]["path"]
        for name, job in workflow["jobs"].items()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    site = re.findall(r"^site_dir: (\S+)", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert kept == {
        "docs": site[0],
        "build": JOBS["build"]["commands"][-1].split()[-1],
        "benchmark": JOBS["benchmark"]["commands"][-1].split()[-1],
    }


def test_list_names_every_job():
    answer = ci_run("--list")

    assert answer.returncode == 0, answer.stderr
    states = dict.fromkeys(JOBS, "runs here")
    for name in ("every-config", "torch-2-9", "torch-2-11", "torch-2-14"):
        minutes = JOBS[name]["timeout_minutes"]
        states[name] = f"skipped: takes up to {minutes} minutes, runs by name only: bash .ci/run {name}"
    states |= dict.fromkeys(("gpu-ops", "benchmark"), "skipped: needs a GPU")
    if importlib.util.find_spec("mkdocs") is None:
        states["docs"] = "skipped: needs MkDocs: pip install '.[docs]'"
    lines = answer.stdout.splitlines()[-len(states) :]
    if "build: runs here" not in lines:  # whether it does depends on the network
        states["build"] = "skipped: needs an index of packages that pip can reach"
    assert lines == [f"{name}: {state}" for name, state in states.items()]


def test_the_wheel_is_not_built_where_pip_reaches_no_index(job_file, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    path = job_file({"build": ("index", "echo must not run")})

    answer = ci_run("--file", path)

    assert answer.returncode == 0 and "must not run" not in answer.stdout, answer.stderr
    assert "build: skipped: needs an index of packages that pip can reach\n" in answer.stdout


def test_runs_what_it_can_and_closes_with_the_tests_summary(job_file):
    summary = "===== 3 passed, 1 skipped in 0.12s ====="
    jobs = {
        "tests": ("nothing", f"echo '{summary}'; echo more"),
        "ops": ("gpu", "echo must not run"),
        "long": ("nothing", "echo must not run"),
        "last": ("nothing", "true"),
    }

    answer = ci_run("--file", job_file(jobs, by_name="long"))

    assert answer.returncode == 0, answer.stderr
    assert "ops: skipped: needs a GPU\n" in answer.stdout
    assert "long: skipped: takes up to 0.05 minutes, runs by name only" in answer.stdout
    assert "must not run" not in answer.stdout
    assert "tests: passed" in answer.stdout and "last: passed" in answer.stdout
    assert answer.stdout.splitlines()[-1] == summary


def test_one_failure_fails_the_run_and_the_others_still_run(job_file):
    jobs = {"first": ("nothing", "false | cat"), "second": ("nothing", "echo $((6 * 7))")}

    answer = ci_run("--file", job_file(jobs))

    assert answer.returncode == 1
    assert "first: failed: false | cat: exit status 1" in answer.stdout
    assert "42\n" in answer.stdout and "second: passed" in answer.stdout


def test_time_limit_ends_a_job_and_what_it_started(job_file):
    answer = ci_run("--file", job_file({"slow": ("nothing", "sleep 600 & sleep 600; wait")}))

    assert answer.returncode == 1
    assert "over its time limit" in answer.stdout


def test_job_asked_for_by_name(job_file):
    jobs = {"one": ("nothing", "true"), "two": ("nothing", "false"), "ops": ("gpu", "true")}
    path = job_file(jobs | {"long": ("nothing", "echo $((6 * 7))")}, by_name="long")

    assert ci_run("--file", path, "one").returncode == 0
    answer = ci_run("--file", path, "long")
    assert answer.returncode == 0 and "42\n" in answer.stdout and "long: passed" in answer.stdout
    answer = ci_run("--file", path, "ops")
    assert answer.returncode == 1 and "ops: skipped: needs a GPU" in answer.stdout
    answer = ci_run("--file", path, "three")
    assert answer.returncode == 2 and "unknown job three; known: one, two, ops, long" in answer.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"needs": "tpu", "timeout_minutes": 1, "commands": ["true"]},
            "expected one of ('nothing', 'gpu', 'index', 'mkdocs'), got 'tpu'",
        ),
        (
            {"needs": "gpu", "commands": ["true"]},
            "expected the keys ['commands', 'needs', 'timeout_minutes']",
        ),
        (
            {"needs": "gpu", "timeout_minutes": 1, "commands": ["true"], "by_nam": True},
            "if need be ['by_name'], got ['by_nam', ",
        ),
        (
            {"needs": "gpu", "timeout_minutes": 1, "commands": ["true"], "by_name": "no"},
            "by_name: expected true or false, got 'no'",
        ),
    ],
)
def test_unsound_list_of_jobs_is_refused(tmp_path, entry, message):
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump({"jobs": {"job": entry}}))

    answer = ci_run("--file", path)

    assert answer.returncode != 0
    assert message in answer.stderr
