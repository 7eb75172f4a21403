# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Measuring in several processes: what they are told and leave behind, providers of their own, results joined, what a
lost CUDA context leaves, and compiling ahead."""

import dataclasses
import itertools
import json
import os
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from bench_records import RECORD_FIELDS, make_record, make_result

from bench import run
from bench.block.families import Section
from bench.measure import inductor, processes, provenance, warm
from bench.measure.processes import differences, join, measure_apart, measure_others
from bench.measure.provenance import PACKAGE
from bench.measure.session import ContextLostError
from bench.measure.shapes import OPS
from bench.providers.ours import MAX_AUTOTUNE, make_provider
from bench.providers.peers import LIBRARIES, why_missing
from bench.report import html_report, tables
from bench.report import join as join_command

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


def answer(asked, **changes):
    """Replace measure_apart: note who is asked for, and make a record of each at each shape."""

    def apart(names, shapes, dtype, ops, folder, options=()):
        asked.append((names, shapes, dtype, ops, options))
        cells = itertools.product(shapes, names, ops)
        records = [make_record(provider=name, rows=m, cols=n, op=op) for (m, n), name, op in cells]
        return make_result(*records, copy_gb_per_s=3000.0, **changes)

    return apart


def test_what_needs_its_own_process_gets_one(monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "measure_apart", answer(asked))
    result = make_result(make_record(rows=4, cols=8))
    measure_others([(("tilegym",), ((4, 8),))], ("cutile",), ("backward",), "bfloat16", result)
    assert asked == [(("tilegym",), ((4, 8),), "bfloat16", ("backward",), ("--warm",))]
    assert [each["provider"] for each in result["records"]] == ["cutile", "tilegym"]
    (process,) = result["processes"]
    assert (process["copy_gb_per_s"], process["shapes"]) == (3000.0, "4x8")


SHAPES = ((1, 8), (2, 8), (3, 8))


@pytest.fixture
def losing(monkeypatch):
    """A benchmark whose quack loses the CUDA context at 2 rows: main, called with a folder and options, and what other
    processes are asked for."""
    asked = []

    class Losing:
        copy_bytes_per_second = 3e12

        def __init__(self, providers, ops, device):
            self.providers, self.ops = providers, ops

        def measure(self, shape, dtype, progress):
            if shape == (2, 8):
                raise ContextLostError("quack", "illegal address")
            name = str(dtype).removeprefix("torch.")
            return [make_record(provider=each, rows=shape[0], cols=8, dtype=name) for each in self.providers]

    def main(folder, *options):
        arguments = ["--provider", "cutile,quack", "--shapes", "1x8,2x8,3x8", "--op", "backward"]
        return run.main([*arguments, "--out", str(folder), *options])

    monkeypatch.setattr(run, "Bench", Losing)
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(html_report, "why_none", lambda: "not here")
    monkeypatch.setattr(processes, "measure_apart", answer(asked))
    return main, asked


def result_in(folder, dtype="bfloat16"):
    (path,) = folder.glob(f"*-{dtype}.json")
    return json.loads(path.read_text())


def test_after_a_lost_context_all_go_on_behind_that_shape(losing, tmp_path):
    main, asked = losing
    assert main(tmp_path) == 0, "of this package nothing failed"
    assert [each[:2] for each in asked] == [(("cutile",), ((2, 8),)), (("cutile", "quack"), ((3, 8),))]
    result = result_in(tmp_path)
    (failed,) = [each for each in result["records"] if each["error"]]
    assert (failed["provider"], failed["op"], failed["rows"]) == ("quack", "backward", 2)
    assert failed["error"] == "lost the CUDA context: illegal address"
    cells = [(each["provider"], each["rows"]) for each in result["records"] if each["us"]]
    assert sorted(cells) == [("cutile", 1), ("cutile", 2), ("cutile", 3), ("quack", 1), ("quack", 3)]
    found = [(each["providers"], each["shapes"], each["copy_gb_per_s"]) for each in result["processes"]]
    assert found == [(["cutile"], "2x8", 3000.0), (["cutile", "quack"], "3x8", 3000.0)]


def test_after_a_lost_context_the_next_dtype_is_measured_elsewhere(losing, tmp_path):
    main, asked = losing
    assert main(tmp_path, "--dtype", "bfloat16,float32") == 0
    assert asked[2:] == [(("cutile", "quack"), SHAPES, "float32", ("backward",), ())]
    assert len(result_in(tmp_path, "float32")["records"]) == 6


def test_after_a_lost_context_other_families_of_ops_are_measured_elsewhere(losing, tmp_path):
    main, asked = losing
    assert main(tmp_path, "--op", "residual_forward,bias_forward", "--shapes", "2x8,3x8") == 0
    both, shapes = ("cutile", "quack"), ((2, 8), (3, 8))
    assert [(names, of, ops) for names, of, _, ops, _ in asked] == [
        (("cutile",), ((2, 8),), ("residual_forward",)),
        (both, ((3, 8),), ("residual_forward",)),
        (both, shapes, ("bias_forward",)),
    ]


def test_a_part_says_where_it_lost_its_context_and_ends(losing, tmp_path):
    main, asked = losing
    assert main(tmp_path, "--part", "--dtype", "bfloat16,float32") == 1
    assert asked == [] and len(list(tmp_path.iterdir())) == 1
    result = result_in(tmp_path)
    assert result["lost"] == ["quack", [2, 8], "illegal address"]
    cells = [(each["provider"], each["rows"], each["us"]) for each in result["records"]]
    assert cells == [("cutile", 1, 100.0), ("quack", 1, 100.0), ("quack", 2, None)]


def test_what_a_part_left_that_lost_its_context_is_measured_by_others(monkeypatch):
    """One after the other, not each within the one before: every process that lost its context keeps memory."""
    asked = []

    def apart(names, shapes, dtype, ops, folder, options=()):
        result = answer(asked)(names, shapes, dtype, ops, folder, options)
        if len(asked) == 1:
            result["records"] = result["records"][:2]
            result["lost"] = ["quack", [2, 8], "illegal address"]
        return result

    monkeypatch.setattr(processes, "measure_apart", apart)
    result = make_result()
    measure_others([(("cutile", "quack"), SHAPES)], ("cutile", "quack"), ("backward",), "bfloat16", result)
    assert [each[:2] for each in asked[1:]] == [(("cutile",), ((2, 8),)), (("cutile", "quack"), ((3, 8),))]
    assert all(each[-1] == () for each in asked), "compiled by then"
    assert len(result["records"]) == 5 and "lost" not in result


def test_only_ops_that_a_provider_has_are_said_to_have_failed():
    loss, before = processes.Loss("quack", (2, 8), "illegal address"), [make_record(provider="quack")]
    ops = ("backward", "dx")
    assert [each["op"] for each in processes.lost_records(loss, ops, "bfloat16", before)] == ["backward"]
    assert [each["op"] for each in processes.lost_records(loss, ops, "bfloat16", [])] == ["backward", "dx"]


@pytest.fixture
def pool(monkeypatch):
    """A pool of this one process, which runs `run`: how many were made, the tasks that it was given in their order, and
    "all done" where someone waited for them."""
    found = SimpleNamespace(made=0, events=[], run=lambda task, device: None)

    class Pool:
        def __init__(self, processes, mp_context, initializer, initargs):
            found.made += 1

        __enter__, __exit__ = (lambda self: self), (lambda *_: None)

        def submit(self, function, task, device):
            found.events.append(task)
            future = Future()
            future.set_result(found.run(task, device))
            return future

    def as_completed(futures):
        found.events.append("all done")
        return futures

    monkeypatch.setattr(warm, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(warm, "as_completed", as_completed)
    return found


def test_compiling_ahead_makes_the_first_calls_of_everything(monkeypatch, pool):
    done = []
    pool.run = warm.first_calls
    monkeypatch.setattr(warm, "NOT_WARMED", frozenset(("liger.cute",)))
    monkeypatch.setattr(
        warm,
        "run_op",
        lambda provider, op, inputs, poisons: done.append((provider.name, op, *inputs.x.shape)),
    )
    providers, shapes = ("torch", "no such provider", "liger.cute"), ((4, 8), (2, 8))
    assert warm.warm(providers, [Section(OPS, shapes)], [torch.float32], CPU, processes=2) == 4
    ops = ("forward", "backward", "both")
    assert done == [("torch", op, *shape) for shape in shapes for op in ops]


def test_what_inductor_measures_comes_last_and_alone(pool):
    """Others' work on the GPU would be in Inductor's times."""
    providers = ("torch.compile", "cutile", MAX_AUTOTUNE, "quack")
    warm.warm(providers, [Section(OPS, ((4, 8),))], [torch.float32], CPU, processes=2)
    quack = ["quack"] * warm.SHARES["quack"]
    found = [getattr(each, "provider", each) for each in pool.events]
    assert found == ["cutile", *quack, "all done", "torch.compile", MAX_AUTOTUNE, "all done"]


def test_all_sections_share_one_pool_and_nothing_compiles_twice(pool):
    heads = (16384 * 8, 64), (16384 * 28, 64), (16384 * 8, 80)
    sections = [Section(("residual_forward",), ((32, 64),)), Section(("qk_norm_forward",), heads)]
    count = warm.warm(("cutile", "quack"), sections, [torch.float32], CPU, processes=2)
    tasks = [each for each in pool.events if each != "all done"]
    assert pool.made == 1 and count == len(tasks)
    of_quack = [(task.shape, task.share) for task in tasks if task.provider == "quack"]
    assert of_quack[:4] == [((32, 64), share) for share in range(warm.SHARES["quack"])]
    assert of_quack[4:] == [((16384 * 8, 80), 0), ((16384 * 8, 64), 0)], "of heads it compiles for each width"
    assert [task.shape for task in tasks if task.provider == "cutile"] == [(32, 64), *heads]


def test_quack_compiles_plain_ops_once_for_a_width(pool):
    """Two sizes of sixty drawn widths were all compiled twice."""
    warm.warm(("quack", "triton"), [Section(OPS, ((32, 64), (4, 64)))], [torch.float32], CPU, processes=2)
    tasks = [each for each in pool.events if each != "all done"]
    assert [task.shape for task in tasks if task.provider == "quack"] == [(32, 64)] * warm.SHARES["quack"]
    assert [task.shape for task in tasks if task.provider == "triton"] == [(32, 64), (4, 64)]


def test_processes_share_the_settings_of_one_provider(monkeypatch):
    done = []
    right = make_provider("torch", (4, 8), torch.float32, CPU)
    settings = [dataclasses.replace(right, name=str(number)) for number in range(7)]
    monkeypatch.setattr(warm, "SHARES", {"quack": 3})
    monkeypatch.setattr(warm, "make_providers", lambda *_: settings)
    monkeypatch.setattr(warm, "run_op", lambda setting, op, *_, **__: done.append((setting.name, op)))
    for share in range(3):
        warm.first_calls(warm.Task("quack", (4, 8), torch.float32, share), CPU)
    assert [name for name, op in done if op == "forward"] == list("0361425")


def test_inputs_of_what_inductor_measures_are_made_in_turn(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(warm.inductor, "time_by_device", events.append)
    monkeypatch.setattr(warm, "_turn", None)
    warm._take_turns_in_tuning(tmp_path / "lock")
    monkeypatch.setattr(inductor.fcntl, "flock", lambda file, mode: events.append("locked"))
    monkeypatch.setattr(warm, "make_inputs", lambda *_, **__: (events.append("made"), [None])[1])
    monkeypatch.setattr(warm, "make_providers", lambda *_: [])
    for provider in ("cutile", "torch.compile"):
        warm.first_calls(warm.Task(provider, (4, 8), torch.float32), CPU)
    assert events == [tmp_path / "lock", "made", "locked", "made"] and warm._turn == tmp_path / "lock"


SCRIPT = """
import dataclasses, os
from pathlib import Path
from bench.measure import warm
from bench.providers.ours import make_provider

def make(name, *arguments):
    torch = make_provider("torch", *arguments)
    def forward(x, weight):
        Path(os.environ["MARKS"], f"{os.getpid()} {name} {tuple(x.shape)} {warm._turn.name}").touch()
        return torch.forward(x, weight)
    return [dataclasses.replace(torch, forward=forward, norm=None)]

warm.make_providers = make
"""


def test_compiling_ahead_runs_in_processes_of_its_own(tmp_path, monkeypatch):
    """A process that is spawned imports the script that was started; here one whose provider leaves marks. What
    Inductor compiles ahead: tests/bench/test_bench_processes.py."""
    script, marks = tmp_path / "script.py", tmp_path / "marks"
    script.write_text(SCRIPT)
    marks.mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert warm.warm(("cutile",), [Section(OPS, ((4, 8), (2, 8)))], [torch.float32], CPU, processes=1) == 2
    found = [mark.name.split(" ", 1) for mark in marks.iterdir()]
    assert {text for _, text in found} == {"cutile (4, 8) lock", "cutile (2, 8) lock"}
    (process,) = {int(process) for process, _ in found}
    assert process != os.getpid()


def test_a_part_of_a_run_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = processes.measure_apart(("torch",), ((3, 8),), "float32", ("forward",), tmp_path)
    assert [(each["provider"], each["op"], each["rows"]) for each in result["records"]] == [
        ("torch", "forward", 3)
    ]
    assert result["records"][0]["us"] > 0 and result["gpu"] is None


def test_a_part_of_a_block_is_found_by_its_name(tmp_path, monkeypatch):
    """Results of these ops end in -block, but for those of parts, which are looked for by their dtype."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = processes.measure_apart(("torch",), ((3, 8),), "float32", ("bias_forward",), tmp_path)
    assert [(each["op"], each["error"]) for each in result["records"]] == [("bias_forward", None)]


def test_compiling_ahead_fills_the_caches_from_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Or Inductor asks the C++ compiler which vectors the CPU has, for seconds.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # A plain one, and of a block.
    sections = [Section((op,), ((4, 8),)) for op in ("forward", "bias_forward")]
    assert warm.warm(("torch.compile",), sections, [torch.float32], CPU, processes=1) == 2
    assert list(tmp_path.rglob("*.py"))
