# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Measurements by other processes: providers of their own, and what a lost CUDA context leaves."""

from __future__ import annotations

import itertools
import json

import pytest
from bench_records import make_record, make_result

from bench import run
from bench.measure import processes
from bench.measure.processes import measure_others
from bench.measure.session import ContextLostError
from bench.report import html_report


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
