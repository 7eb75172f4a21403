# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiling ahead of a benchmark, in other processes."""

from __future__ import annotations

import dataclasses
import os
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from bench.block.families import Section
from bench.measure import inductor, warm
from bench.measure.shapes import OPS
from bench.providers.ours import MAX_AUTOTUNE, make_provider

CPU = torch.device("cpu")


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
    Inductor compiles ahead: tests/processes/test_benchmark.py."""
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
