# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's command: what it takes, where its results go, and an interpreter that lacks something: it is refused
in one line, with the command that installs it. An active environment that is not taken is named."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_records import RECORD_FIELDS, make_record

import tilegym_rmsnorm
from bench import remedy, run
from bench.measure import processes
from bench.measure.provenance import RESULTS, ROOT, choose_tables, describe_run, hash_sources, one_line
from bench.measure.shapes import OPS
from bench.providers import peers
from bench.providers.peers import ALL_PROVIDERS
from bench.report import html_report
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE
from tilegym_rmsnorm.commands import installation


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
    assert result["sources"] == hash_sources() and result["inductor_timer"] is False
    assert [(record["op"], record["rows"]) for record in result["records"]] == [
        (op, m) for m in (4, 3) for op in ("forward", "backward", "both")
    ]
    assert all(set(record) == RECORD_FIELDS and record["us"] > 0 for record in result["records"])
    files = {path.name, f"{path.stem}.csv"}
    assert {file.name for file in tmp_path.iterdir()} == files, "no pictures of what is no GPU's"
    assert done.stdout.splitlines()[-1] == f"written: {path} and .csv"
    assert "GB/s" not in done.stdout and " us " not in done.stdout, "times of busy cores"
    assert len(re.findall(r"^\w+, bfloat16: largest error of any result", done.stdout, re.MULTILINE)) == 3
    shown = re.findall(r"^[43] x (?:16|7) +(\S+)$", done.stdout, re.MULTILINE)
    assert len(shown) == 6 and all(float(error) < 0.1 for error in shown)


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
        path = RESULTS / folder / "2026-11-21-bfloat16.json"
        assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", str(path)]).returncode == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--provider", "torhc"], f"expected some of {', '.join(ALL_PROVIDERS)}, got torhc"),
        (["--shapes", "4x"], "argument --shapes: expected ROWSxCOLS,... with both at least 1, got '4x'"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(options)
    assert message in capsys.readouterr().err


@pytest.fixture
def in_this_process(monkeypatch):
    """Commands of the benchmark run here: a process of their own takes seconds to import torch."""

    start = subprocess.run

    def run_here(command, **options):
        if list(command[:3]) != [sys.executable, "-m", "bench.run"]:  # git
            return start(command, **options)
        return subprocess.CompletedProcess(command, run.main(command[3:]))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(processes.subprocess, "run", run_here)


def test_a_run_that_measures_nothing_says_why_and_fails(tmp_path, in_this_process, capsys):
    options = ("--shapes", "4x16", "--provider", "torch", "--op", "dx", "--out", str(tmp_path))
    assert run.main(options) == 1
    out, errors = capsys.readouterr()
    assert errors.splitlines()[-1] == "nothing was measured: torch has no dx"
    assert "written" not in out and not list(tmp_path.iterdir())


def test_a_part_of_a_run_measures_what_it_is_told(tmp_path, in_this_process):
    ops = ("forward", "backward")
    result = processes.measure_apart(("torch",), ((3, 8), (4, 8)), "float32", ops, tmp_path)
    assert [(each["op"], each["rows"]) for each in result["records"]] == [
        (op, rows) for rows in (3, 4) for op in ops
    ]
    assert all(set(each) == RECORD_FIELDS and each["us"] > 0 for each in result["records"])


def test_what_a_part_of_a_run_does_not_offer_is_its_reason(tmp_path, in_this_process):
    result = processes.measure_apart(("torch",), ((4, 16),), "bfloat16", ("dx",), tmp_path)
    assert [(each["op"], each["error"]) for each in result["records"]] == [("dx", "torch has no dx")]


def test_a_part_of_a_run_without_the_library_says_what_is_missing(tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr(peers, "_is_installed", lambda module: module != "tilegym")
    result = processes.measure_apart(("tilegym",), ((3, 8),), "bfloat16", ("forward",), tmp_path)
    (record,) = result["records"]
    assert record["error"].startswith("no module tilegym")


def test_a_run_in_which_everything_failed_fails(measured, monkeypatch, capsys):
    """Also of peers, whose failures alone are no reason."""
    main, _ = measured
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    failed = make_record(None, provider="quack")
    monkeypatch.setattr(run.Bench, "measure", lambda *_: [failed])
    result = main("--provider", "quack", status=1)
    assert "nothing was measured: quack (backward 4096x1024): ValueError: broken" in capsys.readouterr().err
    assert result["records"] == [failed], "with the reason"
    monkeypatch.setattr(run.Bench, "measure", lambda *_: [failed, make_record(provider="F.rms_norm")])
    main("--provider", "quack,F.rms_norm")


@pytest.mark.parametrize("why", ["a file", "no permission"])
def test_results_that_cannot_be_kept_are_refused_before_anything_is_measured(
    why, measured, tmp_path, monkeypatch, capsys
):
    _, events = measured
    folder = tmp_path / "results"
    if why == "a file":
        folder.write_text("")
    else:
        monkeypatch.setattr(installation.os, "access", lambda path, mode: path != folder)
    assert run.main(["--provider", "torch", "--out", str(folder)]) == 1
    assert events == [] and "no results can be kept there: " in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a main that measures nothing, and its events; main returns its result."""
    events = []

    class Nothing:
        copy_bytes_per_second, ops = None, OPS

        def __init__(self, providers, ops, device):
            events.append("measures")
            self.providers = providers

        def measure(self, shape, dtype, progress):
            events.append(os.environ[CACHE_VARIABLE])
            return [make_record(provider=name) for name in self.providers]

    def main(*options, status=0, files=1):
        assert run.main(["--shapes", "4x8", "--out", str(tmp_path), *options]) == status
        path, *others = tmp_path.glob("*.json")
        assert len(others) == files - 1
        return json.loads(path.read_text())

    monkeypatch.setattr(run.inductor, "time_by_device", lambda: events.append("timer"))
    monkeypatch.setattr(run, "Bench", Nothing)
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    return main, events


@pytest.mark.parametrize(
    ("providers", "is_given"), [("torch,torch.compile", True), ("torch,F.rms_norm", False)]
)
def test_the_process_that_measures_gives_inductor_its_timer(measured, providers, is_given):
    """Before anything is compiled there; and the result says so."""
    main, events = measured
    assert main("--provider", providers)["inductor_timer"] is is_given
    assert events == ["timer", "measures", "off"][not is_given :]


def on_a_gpu() -> dict[str, object]:
    return describe_run() | {"gpu": "NVIDIA H100"}


def test_one_page_has_the_results_of_all_dtypes(measured, monkeypatch):
    main, _ = measured
    pages = []
    pytest.importorskip("plotly", reason="plotly, which draws the page, is not installed")
    monkeypatch.setattr(run, "describe_run", on_a_gpu)
    monkeypatch.setattr(html_report, "write", lambda results, path: pages.append((len(results), path.name)))
    main("--provider", "torch", "--dtype", "float32,bfloat16", files=2)
    assert pages == [(2, "report.html")]
    main("--provider", "torch", "--part", files=2)
    assert len(pages) == 1, "a part of a run is none that anybody reads"


def test_without_plotly_a_run_keeps_its_files_and_says_why_there_is_no_page(
    measured, monkeypatch, tmp_path, capsys
):
    main, _ = measured
    monkeypatch.setattr(run, "describe_run", on_a_gpu)
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    assert main("--provider", "torch")["records"]
    assert list(tmp_path.glob("*.csv")) and not list(tmp_path.glob("*.html"))
    remedy = f"{sys.executable} -m pip install '{ROOT}[bench]'"
    assert f"\nno report.html: plotly is not installed. To install it: {remedy}\n" in capsys.readouterr().out


# The user's tables


def test_what_a_user_tuned_is_not_measured_unless_asked_for(measured, monkeypatch, tmp_path):
    main, events = measured
    monkeypatch.delenv(CACHE_VARIABLE)
    result = main("--provider", "torch")
    assert events[-1] == "off" and result["user_tables"] is None and "tables" not in one_line(result)
    result = main("--provider", "torch", "--tables", str(tmp_path))
    assert events[-1] == result["user_tables"] == str(tmp_path)
    assert f"the user's tables in {tmp_path}" in one_line(result)


def test_a_folder_of_tables_in_the_environment_counts_in_every_process(monkeypatch, tmp_path):
    """Others run in the repository."""
    monkeypatch.chdir(tmp_path)
    for value, expected in (("tuned", str(tmp_path / "tuned")), ("off", None), ("", None)):
        monkeypatch.setenv(CACHE_VARIABLE, value)
        choose_tables()
        assert describe_run()["user_tables"] == expected
        assert os.environ[CACHE_VARIABLE] == (expected or "off")


def test_tables_that_are_not_there_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(["--tables", str(tmp_path / "none")])
    assert "argument --tables: expected a folder, got" in capsys.readouterr().err


def test_sources_are_told_apart_by_names_and_contents(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(Path(tilegym_rmsnorm.__file__).parent, package)
    assert hash_sources(package) == hash_sources() == describe_run()["sources"]
    table = next(package.rglob("plans/sm_*.json"))
    before = table.read_text()
    table.write_text(before.replace('"warps": 8', '"warps": 4', 1))
    assert hash_sources(package) != hash_sources()
    table.write_text(before)
    (package / "cache.pyc").write_text("")
    assert hash_sources(package) == hash_sources()
    (package / "functional.py").rename(package / "opt.py")
    assert hash_sources(package) != hash_sources()


SAID = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


def test_an_older_torch_is_refused(tmp_path):
    for name in ("torch", "matplotlib", "tabulate", "tqdm"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "torch-2.8.1.egg-info").write_text("Name: torch\nVersion: 2.8.1\n")
    python = tmp_path / "python"
    command = f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"'  # -S: without site-packages
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", "bench/run.sh"], env=os.environ | {"PYTHON": str(python)}, **SAID)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{python} lacks: torch>=2.9. Install them there: {python} -m pip install " in done.stderr


def test_a_command_names_what_is_missing():
    command = [sys.executable, "-S", "-m", "bench.run"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, **SAID)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.endswith(f"{remedy()}\n")
    assert "the benchmark needs torch matplotlib tabulate tqdm. To install" in done.stderr


@pytest.mark.parametrize("is_complete", [False, True], ids=["lacks packages", "complete"])
@pytest.mark.parametrize("has_venv", [False, True], ids=["nothing else", "another .venv"])
def test_an_active_environment_that_is_not_taken_is_named(tmp_path, is_complete, has_venv):
    """A script says what the environment lacks and how to choose it, before it makes or takes another one."""

    def make_python(path, options):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} {options} "$@"\n')
        path.chmod(0o755)

    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script, active = tmp_path / "run.sh", tmp_path / "active"
    script.write_text('. scripts/environment.sh\nensure_environment bench\necho "$PYTHON"\n')
    make_python(active / "bin" / "python3", "" if is_complete else "-S")
    if has_venv:
        make_python(tmp_path / ".venv" / "bin" / "python", "")
    path = os.pathsep.join([str(active / "bin"), "/usr/bin", "/bin"])
    environment = {"PATH": path, "VIRTUAL_ENV": str(active)}
    if not is_complete:
        (active / "bin" / "python").symlink_to("python3")  # or another one of the machine may be complete
    done = subprocess.run(
        ["bash", script], **SAID | {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
    )
    if is_complete and not has_venv:
        assert (done.returncode, done.stdout, done.stderr) == (0, "python3\n", "")
        return
    note = done.stderr.splitlines()[0]
    assert note.startswith(f"note: runs in {tmp_path}/.venv. To run in the active environment, {active}: ")
    assert note.endswith(f"PYTHON=python3 {script}")
    lacks = "it lacks torch>=2.9 matplotlib tabulate tqdm plotly"
    install = f"{lacks}; python3 -m pip install -e '{tmp_path}[bench]', then PYTHON=python3"
    assert (install in note) is not is_complete
    assert done.returncode == (0 if has_venv else 1)
