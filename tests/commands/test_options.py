# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Command lines: what is no value is refused, by every command, however it is called."""

import importlib
from pathlib import Path

import pytest
import torch

import tilegym_rmsnorm
from tilegym_rmsnorm import __main__
from tilegym_rmsnorm.commands import installation
from tilegym_rmsnorm.commands.tune import tune

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in (ROOT / "bench").rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
COMMANDS = {path.relative_to(ROOT / "bench").with_suffix("").as_posix().replace("/", ".") for path in SCRIPTS}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        # An empty text is what an unset variable of a shell leaves; as a path it was the working directory.
        ("run", ("--out", ""), "--out: expected a path, got ''"),
        ("run", ("--tables", ""), "--tables: expected a path, got ''"),
        ("run", ("--provider", ""), "--provider: expected some of "),
        ("run", ("--shapes", ""), "--shapes: expected ROWSxCOLS,... with both at least 1, got ''"),
        ("train.__main__", ("--out", ""), "--out: expected a path, got ''"),
        ("studies.one_launch_or_two", ("--out", ""), "--out: expected a path, got ''"),
        ("train.__main__", ("--model", ""), "--model: expected some of "),
        ("train.__main__", ("--norm", ""), "--norm: expected names, got ''"),
        ("gate", ("",), "result: expected a path, got ''"),
        ("gate", ("new.json", "--results", ""), "--results: expected a path, got ''"),
        # No slowdown is above a NaN, so every result passed.
        (
            "gate",
            ("new.json", "--threshold", "nan"),
            "--threshold: expected a number of at least 0, got 'nan'",
        ),
        ("gate", ("new.json", "--threshold", "-1"), "--threshold: expected a number of at least 0, got '-1'"),
        ("gate", ("new.json", "--threshold", "a"), "--threshold: expected a number of at least 0, got 'a'"),
        ("report.html_report", ("",), "RESULT.json: expected a path, got ''"),
        ("report.html_report", ("--out", "", "a.json"), "--out: expected a path, got ''"),
        ("report.plots", ("",), "RESULT.json: expected a path, got ''"),
        ("report.join", ("", "other.json"), "RESULT.json: expected a path, got ''"),
        ("studies.host", ("--rows", "0"), "--rows: expected a whole number of at least 1, got '0'"),
        ("studies.host", ("--columns", "-1"), "--columns: expected a whole number of at least 1, got '-1'"),
        ("studies.host", ("--samples", "0"), "--samples: expected a whole number of at least 1, got '0'"),
        ("studies.host", ("--samples", "1"), "--samples: expected at least 2"),
        (
            "studies.host",
            ("--first-call", "0"),
            "--first-call: expected a whole number of at least 1, got '0'",
        ),
        ("studies.traced", ("--out", ""), "--out: expected a path, got ''"),
        ("studies.traced", ("--shape", ""), "--shape: expected "),
        ("tune", ("--out", ""), "--out: expected a path, got ''"),
        ("tune", ("--n", ""), "--n: expected a whole number of at least 1, got ''"),
        ("tune", ("--processes", "0"), "--processes: expected a whole number of at least 1, got '0'"),
        ("doctor", ("--backend", ""), "--backend: expected one of"),
    ],
)
def test_what_is_no_value_is_refused(command, options, message, capsys):
    in_bench = command in COMMANDS
    main = importlib.import_module(f"bench.{command}").main if in_bench else __main__.main
    with pytest.raises(SystemExit, match="2"):
        main(list(options) if in_bench else [command, *options])
    assert message in capsys.readouterr().err


def test_no_slowdown_at_all_may_be_asked_for(tmp_path, capsys):
    from bench_records import make_record, make_result

    from bench import gate
    from bench.report import tables

    tables.write_json(make_result(make_record(100.0)), tmp_path / "nvidia-h100-80gb-hbm3" / "old.json")
    tables.write_json(make_result(make_record(101.0)), tmp_path / "new.json")
    arguments = [str(tmp_path / "new.json"), "--results", str(tmp_path)]
    assert gate.main(arguments) == 0
    assert gate.main([*arguments, "--threshold", "0"]) == 1


def test_a_number_of_processes_is_chosen_only_where_none_is_given(monkeypatch):
    """0 of them was taken for none given."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile.tuning import workers

    asked = []
    monkeypatch.setattr(workers, "count_processes", lambda *_: 3)
    monkeypatch.setattr(workers, "search_all", lambda *options: asked.append(options[-1]) or [])
    for given in (None, 0, 2):
        tune([], None, None, None, None, 1, given)
    assert asked == [3, 0, 2]


@pytest.mark.parametrize("missing", [None, "cuda-tile", "triton"])
def test_version_names_what_chooses_the_kernels(missing, monkeypatch, capsys):
    versions = {"cuda-tile": "1.7.3", "triton": "3.9.1"} | ({missing: None} if missing else {})
    monkeypatch.setattr(__main__, "package_version", versions.get)
    with pytest.raises(SystemExit) as end:
        __main__.main(["--version"])
    tile, triton = (f"{name} {version or 'not installed'}" for name, version in versions.items())
    own = f"tilegym_rmsnorm {tilegym_rmsnorm.__version__}, torch {torch.__version__}"
    assert end.value.code == 0 and capsys.readouterr().out == f"{own}, {tile}, {triton}\n"


# Folders that are asked about


def test_a_folder_that_may_be_written_to_is_not_left_behind(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert installation.why_not_writable(folder) is None and not any(tmp_path.iterdir())
    folder.parent.mkdir()
    assert installation.why_not_writable(folder) is None and folder.parent.exists()
    assert not folder.exists()
    folder.mkdir()
    assert installation.why_not_writable(folder) is None and folder.exists(), "it was there before"


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def full(self, *options, **named):
        if self.name == "folder" and self.parent.exists():
            raise OSError("No space left on device")
        mkdir(self, *options, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    assert installation.why_not_writable(tmp_path / "new" / "folder") == "No space left on device"
    assert not any(tmp_path.iterdir())
