# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Measuring in several processes: providers of their own, results joined. What they do about a lost context:
test_bench_lost.py."""

from __future__ import annotations

import json

import pytest
import torch
from bench_records import RECORD_FIELDS, make_record, make_result

from bench import run
from bench.measure import processes, provenance
from bench.measure.processes import differences, join, measure_apart
from bench.measure.provenance import PACKAGE
from bench.providers.peers import LIBRARIES, why_missing
from bench.report import join as join_command
from bench.report import tables

CPU = torch.device("cpu")


# Joined results


def test_joining_adds_providers_that_the_result_lacks():
    result = make_result(make_record(), unavailable={"tilegym": "not installed"})
    other = make_result(make_record(), make_record(120.0, provider="tilegym"), copy_gb_per_s=2979.0)
    assert join(result, other) == ["tilegym"]
    assert [record["provider"] for record in result["records"]] == ["cutile", "tilegym"]
    assert result["unavailable"] == {}
    assert differences(result) == ["tilegym: in a process of its own, device copy 2979 GB/s (-1.0%)"]
    del result["processes"][0]["shapes"]  # as in results of before
    assert len(differences(result)) == 1
    assert join(result, other) == [] and len(result["processes"]) == 1


def test_joining_adds_shapes_that_the_result_lacks():
    result = make_result(make_record(rows=1))
    assert join(result, make_result(make_record(50.0, rows=1), make_record(rows=2))) == ["cutile"]
    assert [(record["rows"], record["us"]) for record in result["records"]] == [(1, 100.0), (2, 100.0)]


@pytest.mark.parametrize(
    ("version", "text"),
    [("0+unknown", "tilegym_rmsnorm at commit 0123"), ("1.2", "tilegym_rmsnorm 1.2 at commit 0123")],
)
def test_a_line_about_a_run_names_the_commit_and_a_version_if_there_is_one(version, text):
    result = make_result(make_record(), commit="0123456789abcdef")
    result["versions"] = {"torch": "2.11.0", "tilegym_rmsnorm": version, "quack-kernels": "0.6.5"}
    line = provenance.one_line(result)
    assert text in line and "unknown" not in line and "torch 2.11.0, quack-kernels 0.6.5" in line


def test_joining_replaces_cells_that_failed_and_no_others():
    failed = make_record(None, rows=1)
    result = make_result(failed, make_record(50.0, rows=2))
    other = make_result(make_record(70.0, rows=1), make_record(70.0, rows=2), commit="f" * 40)
    assert join(result, other) == ["cutile"]
    assert [(record["rows"], record["us"]) for record in result["records"]] == [(2, 50.0), (1, 70.0)]
    assert "cutile in part of commit ffffffffffff" in provenance.one_line(result)
    result["processes"] *= 2
    assert provenance.one_line(result).count("in part of") == 1, "said once, whatever the number of processes"
    del result["processes"][1:]
    assert join(result, make_result(failed)) == [] and len(result["processes"]) == 1


def test_joining_a_joined_result_names_the_processes_that_measured():
    """tilegym never shares one; of the others in a joined result both may have measured a part."""
    parts = make_result(make_record(120.0, provider="quack"), make_record(120.0, provider="tilegym"))
    parts |= {"commit": "one", "processes": [{"providers": ["tilegym", "cutile"], "commit": "two"}]}
    result = make_result(make_record())
    assert join(result, parts) == ["quack", "tilegym"]
    assert [(each["commit"], each["providers"]) for each in result["processes"]] == [
        ("one", ["quack"]),
        ("two", ["tilegym"]),
    ]


def test_joining_names_the_shapes_that_a_process_measured():
    """Also of a result that was joined itself: the rate of the copy in one process is not that of another."""
    records = [make_record(120.0, provider="quack", rows=rows, cols=8) for rows in (1, 2, 3)]
    other = make_result(*records, copy_gb_per_s=2979.0)
    other["processes"] = [{"providers": ["quack"], "shapes": "2x8", "copy_gb_per_s": 2900.0}]
    result = make_result(*(make_record(rows=rows, cols=8) for rows in (1, 2, 3)))
    join(result, other)
    assert [(each["shapes"], each["copy_gb_per_s"]) for each in result["processes"]] == [
        ("1x8,3x8", 2979.0),
        ("2x8", 2900.0),
    ]
    assert differences(result) == [
        "quack at 2 of 3 shapes: in a process of its own, device copy 2979 GB/s (-1.0%)",
        "quack at 1 of 3 shapes: in a process of its own, device copy 2900 GB/s (-3.6%)",
    ]


def test_joining_keeps_why_something_was_not_measured():
    result = make_result(make_record())
    join(result, make_result(unavailable={"tilegym": "no module tilegym", "cutile": "elsewhere"}))
    assert result["unavailable"] == {"tilegym": "no module tilegym"} and differences(result) == []


def test_results_of_another_gpu_or_dtype_are_not_joined(tmp_path, capsys):
    tables.write_json(make_result(make_record()), tmp_path / "a.json")
    for name, other in {
        "gpu": make_result(make_record(provider="quack"), gpu="NVIDIA H200"),
        "dtype": make_result(make_record(provider="quack", dtype="float16")),
    }.items():
        tables.write_json(other, tmp_path / "b.json")
        with pytest.raises(SystemExit, match="2"):
            join_command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        assert f"differ in {name}: " in capsys.readouterr().err


def test_results_of_other_libraries_or_a_grid_are_not_joined():
    result, versions = make_result(make_record()), {"torch": "2.11.0", "triton": "3.6.0"}
    assert processes.why_apart(
        result, make_result(make_record(), versions=versions | {"torch": "2.13.0"})
    ) == ("versions: {'torch': '2.11.0'} and {'torch': '2.13.0'}")
    assert processes.why_apart(result, make_result(make_record(), is_grid=True)) == "is_grid: False and True"


@pytest.mark.parametrize("key", ["versions", "is_grid", "sources", "user_tables", "inductor_timer"])
def test_what_an_old_result_does_not_say_keeps_it_from_nothing(key):
    new = {"is_grid": False, "sources": "5eed", "user_tables": None, "inductor_timer": True}
    result, old = make_result(make_record(), **new), make_result(make_record(provider="quack"), **new)
    del old[key]
    for one, other in ((result, old), (old, result)):
        assert processes.why_apart(one, other) is None
        assert join(one, other)
        assert len(one["records"]) == 2 and differences(one)


def test_parts_of_other_commits_and_of_environments_with_more_libraries_are_joined():
    """The result then says what they ran with."""
    result = make_result(make_record(), versions={"torch": "2.11.0", PACKAGE: "1.0"})
    versions = {"torch": "2.11.0", PACKAGE: "1.1", "tilegym": "1.5.1"}
    other = make_result(
        make_record(provider="tilegym"), versions=versions, sources="5eed", inductor_timer=True
    )
    assert processes.why_apart(result, other) is None
    join(result, other)
    assert result["versions"] == {"torch": "2.11.0", PACKAGE: "1.0", "tilegym": "1.5.1"}
    (part,) = result["processes"]
    assert (part["sources"], part["inductor_timer"]) == ("5eed", True)


def test_the_command_joins_and_writes_all_files_again(tmp_path, capsys):
    tables.write_json(make_result(make_record()), tmp_path / "a.json")
    tables.write_json(make_result(make_record(130.0, provider="tilegym")), tmp_path / "b.json")
    assert join_command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "added tilegym" in out and "geometric mean of 1 ratios: 1.300" in out
    assert len(json.loads((tmp_path / "a.json").read_text())["records"]) == 2
    assert "tilegym" in (tmp_path / "a.csv").read_text()
    assert (tmp_path / "a-backward.png").exists()


# Processes


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
def test_installed_libraries_are_right_on_this_gpu(library, tmp_path):
    if reason := why_missing(library):
        pytest.skip(reason)
    result = measure_apart((library,), ((256, 1024),), "bfloat16", ("forward", "backward"), tmp_path)
    assert [(each["op"], each["error"]) for each in result["records"]] == [
        ("forward", None),
        ("backward", None),
    ]


def test_a_process_that_dies_leaves_records_that_say_so(tmp_path, monkeypatch):
    died = processes.subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(processes.subprocess, "run", lambda *_, **__: died)
    one = make_record(op="forward", provider="tilegym", rows=3, cols=8)
    tables.write_json(make_result(one), tmp_path / "2026-11-21-bfloat16.json")
    result = measure_apart(("tilegym",), ((3, 8), (4, 8)), "bfloat16", ("forward",), tmp_path)
    done, killed = result["records"]
    assert done == one
    assert set(killed) == RECORD_FIELDS and (killed["rows"], killed["us"]) == (4, None)
    assert killed["error"] == "its process ended with status -9"
    tables.write_csv(result, tmp_path / "it.csv")


def test_a_process_that_ends_early_leaves_records_of_what_it_did_not_reach(tmp_path, monkeypatch):
    """An exception that nothing contains, as of a replay of a CUDA graph: status 1, as of a kernel that is wrong."""
    ended = processes.subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(processes.subprocess, "run", lambda *_, **__: ended)
    one = make_record(provider="torch", rows=3, cols=8)
    tables.write_json(make_result(one), tmp_path / "2026-11-21-bfloat16.json")
    result = measure_apart(("torch",), ((3, 8), (4, 8)), "bfloat16", ("backward", "dx"), tmp_path)
    assert [(each["op"], each["rows"], each["error"]) for each in result["records"]] == [
        ("backward", 3, None),
        ("backward", 4, "its process ended with status 1"),
    ]


def test_what_a_process_left_that_lost_its_context_is_not_said_to_have_failed(tmp_path, monkeypatch):
    ended = processes.subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(processes.subprocess, "run", lambda *_, **__: ended)
    lost = {"lost": ["quack", [3, 8], "illegal address"]}
    tables.write_json(make_result(**lost), tmp_path / "2026-11-21-bfloat16.json")
    result = measure_apart(("cutile", "quack"), ((3, 8), (4, 8)), "bfloat16", ("backward",), tmp_path)
    assert result["records"] == [] and result["lost"] == lost["lost"]


# Who is measured


def test_peers_are_measured_or_named_as_missing(monkeypatch):
    monkeypatch.setattr(run, "why_missing", lambda name: "no module quack" if name == "quack" else None)
    providers, unavailable = run.choose_providers(run.parse_arguments(["--peers"]), True)
    assert {"tilegym", "liger.cute", "torch.compile-max-autotune", "F.rms_norm"} <= set(providers)
    assert "quack" not in providers and unavailable["quack"] == "no module quack"
    assert "tilegym" not in run.choose_providers(run.parse_arguments([]), True)[0]


def test_a_named_peer_that_is_missing_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(run, "why_missing", lambda name: "no module quack" if name == "quack" else None)
    chosen = run.choose_providers(run.parse_arguments(["--provider", "cutile,quack"]), True)
    assert chosen == (("cutile",), {"quack": "no module quack"})


def test_a_grid_has_few_providers(monkeypatch):
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    providers, _ = run.choose_providers(run.parse_arguments(["--grid"]), True)
    assert "quack" in providers and len(providers) <= 5
