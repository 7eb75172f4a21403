# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark of a backward that splits its blocks between dx and dw, and the page that shows its results."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool

import planning
import pytest
import torch

import tilegym_rmsnorm as tr
from bench import gate, split
from bench.measure.check import make_inputs
from bench.measure.provenance import gpu_slug
from bench.measure.session import ContextLostError, Session
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardSplit

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402

CPU = torch.device("cpu")
SHAPES = list(itertools.product(split.ROWS, split.COLUMNS))
SMALL = list(itertools.product((1040, 2064), (16, 32)))  # more than few rows
GPUS = [planning.device(target=target) for target in (planning.H100, planning.H200)]
ORIGIN = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "cuda": "13.0", "tileiras": "13.4.92"}
ORIGIN |= {"versions": {"torch": "2.11.0"}, "commit": "0123456789abcdef", "dirty": False}
ORIGIN |= {"date": "2026-11-27T10:00:00+00:00"}
MARKED = "before\n\n<!-- split:begin -->\n\nold\n\n<!-- split:end -->\n\nafter\n"


def name_of(facts) -> str:
    return facts.target.gpu if facts.target else f"sm_{facts.architecture}"


class Reference:
    """In the place of launch.Backward: the reference. is_wrong and is_broken, of a plan, make it wrong and raise."""

    is_wrong = is_broken = staticmethod(lambda plan: False)

    def __init__(self, machine, plan):
        self.plan = plan

    def __call__(self, x, dy, weight, rstd, offset):
        assert dy.shape == x.shape and weight.shape == x.shape[1:] and rstd.shape == x.shape[:1]
        self.ran.append(tuple(x.shape))
        if self.is_broken(self.plan):
            raise RuntimeError("no such kernel")
        dx, dw = tr.rms_norm_backward_torch(x, dy, weight, rstd)
        return dx, dw * 1.1 if self.is_wrong(self.plan) else dw


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    made = type("Fake", (Reference,), {"ran": []})
    monkeypatch.setattr(launch, "Backward", made)
    return made


@pytest.fixture
def cpu_as_gpu(fake, monkeypatch):
    """The command, measuring on this CPU."""
    monkeypatch.setattr(split, "why_not_here", lambda: None)
    monkeypatch.setattr(split, "this_gpu", lambda: CPU)
    monkeypatch.setattr(split, "describe_run", lambda: ORIGIN)
    monkeypatch.setattr(split, "choose_tables", lambda: None)  # which would write to the environment
    monkeypatch.setattr(split, "ROWS", (1040, 2064))
    monkeypatch.setattr(split, "COLUMNS", (16, 32))
    ahead = []
    monkeypatch.setattr(split, "compile_ahead", lambda shapes, facts, device: ahead.extend(shapes))
    return ahead


def make_side(us, **changes):
    side = {"plan": "some_kernel", "partial_rows": 4, "launches": 2, "us": us, "us_p10": us, "us_p90": us}
    return side | {"samples": 31, "errors": {"dx": 0.004}, "error": None if us else "broken"} | changes


def make_result(us=(50.0, 100.0, 80.0), shapes=SHAPES, **changes):
    """us: of the selected plan, and of those that split, at every shape."""
    cells = [
        {"rows": rows, "cols": cols, "size": "large", "selected": make_side(us[0])}
        | {"splits": [make_side(each) for each in us[1:]]}
        for rows, cols in shapes
    ]
    return {**ORIGIN, "copy_gb_per_s": 3009.0, "cells": cells} | changes


def write(result, results, name=None):
    name = name or f"{result['date'][:10]}-bfloat16-split.json"
    split.write_json(result, results / gpu_slug(result["gpu"]) / name, "cells")


# What is compared


@pytest.mark.parametrize("facts", [*GPUS, planning.device(80), planning.device(100)], ids=name_of)
def test_the_selector_has_two_kernels_at_every_shape_and_the_others_split(facts, monkeypatch):
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    for shape in SHAPES:
        selected, *others = split.plans_of(shape, facts)
        assert not isinstance(selected.first, Split) and len(set(others)) == len(others) == 6
        for plan in others:
            assert type(plan.first) is BackwardSplit
            plan.first.check(shape[1], 2, facts.architecture)
            assert plan.sizes(shape[0]).partial_rows > 1, (
                "docs/one-launch-or-two.md says so: no slab has so many rows"
            )


@pytest.mark.parametrize("facts", GPUS, ids=name_of)
def test_what_is_compiled_ahead_is_what_the_shapes_need(facts, monkeypatch):
    """Told apart as cuda-tile does. And no call is asked for twice."""
    from compiling import meta, signature_of

    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")

    class Machine:
        def __init__(self):
            self.facts, self.kernels = facts, set()
            self.no_array = meta(64, dtype=torch.float32)

        def empty(self, shape, dtype):
            return meta(*shape, dtype=dtype)

        def bind(self, function, variant, constants):
            def run(grid, arguments):
                symbol = signature_of(arguments, constants).with_mangled_symbol(function.__name__).symbol
                self.kernels.add((symbol, variant.warps, variant.occupancy))

            return run

    def kernels_of(calls):
        machine = Machine()
        for m, plan in calls:
            x = meta(m, plan.problem.n, dtype=split.DTYPE)
            weight, rstd = meta(plan.problem.n, dtype=split.DTYPE), meta(m, dtype=torch.float32)
            launch.Backward(machine, plan)(x, x, weight, rstd, 0.0)
        return machine.kernels

    ahead = split.calls_to_compile(SHAPES, facts)
    every = [(shape[0], plan) for shape in SHAPES for plan in split.plans_of(shape, facts)]
    assert kernels_of(ahead) == kernels_of(every)
    assert len(ahead) < len(every) / 2
    assert all(m * plan.problem.n * 2 * 3 <= 1.5e9 for m, plan in ahead), "fourteen processes at a time"


def test_compiling_ahead_runs_every_call_and_survives_a_death(fake, monkeypatch, capsys):
    """By a pool that runs them here: those of spawned processes know no fake."""
    run, deaths = [], []

    class Pool(Executor):
        def __init__(self, workers, mp_context):
            assert 1 <= workers <= split.PROCESSES and mp_context.get_start_method() == "spawn"

        def submit(self, function, *arguments):
            future = Future()
            run.append(pickle.loads(pickle.dumps((function, arguments))))
            if deaths:
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(function(*arguments))
            return future

    monkeypatch.setattr(split, "ProcessPoolExecutor", Pool)
    facts = planning.device()
    calls = split.calls_to_compile(SMALL, facts)
    split.compile_ahead(SMALL, facts, CPU)
    assert run == [(split.compile_one, (*call, CPU)) for call in calls]
    deaths.append(True)
    split.compile_ahead(SMALL, facts, CPU)
    captured = capsys.readouterr()
    assert "compiling ahead ended early" in captured.out + captured.err


def test_what_does_not_compile_is_left_to_the_check(fake):
    [plan, *_] = split.plans_of(SMALL[0], planning.device())
    split.compile_one(1040, plan, CPU)
    assert fake.ran == [(1040, 16)]
    fake.is_broken = staticmethod(lambda plan: True)
    split.compile_one(1040, plan, CPU)


# What is measured


def test_the_kernels_themselves_pass_the_check():
    """In the interpreter where there is no GPU. Of few rows: a plan takes any number."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    tried = [split.Tried(plan) for plan in split.plans_of((1040, 16), planning.device())]
    [inputs] = make_inputs((20, 16), split.DTYPE, device, sets=1)
    split.check(Session((), ("backward",), device), tried, inputs)
    for each in tried:
        assert each.failure is None and set(each.errors) == {"dx", "dw"}
    assert [each.provider.name.split()[0] for each in tried] == ["backward_tiles"] + ["backward_split"] * 6


def test_a_wrong_kernel_is_reported_and_not_timed(fake):
    fake.is_wrong = staticmethod(lambda plan: getattr(plan.first, "slab", 0) == 512)
    cell = split.measure(Session((), ("backward",), CPU), SMALL[0])
    wrong = [each for each in cell["splits"] if "slab=512" in each["plan"]]
    assert len(wrong) == 2
    for each in wrong:
        assert each["us"] is None and each["error"].startswith("dw has a relative error of")
        assert each["errors"]["dw"] > 0.01, "what it was is kept"
    right = [each for each in cell["splits"] if each not in wrong]
    assert len(right) == 4 and all(each["us"] > 0 and each["error"] is None for each in right)
    fastest = min(each["us"] for each in right)
    assert split.ratio(cell) == cell["selected"]["us"] / fastest
    assert len(split.failures({"cells": [cell]})) == 2


def test_a_kernel_that_raises_leaves_the_others_be(fake):
    fake.is_broken = staticmethod(lambda plan: not isinstance(plan.first, Split))
    cell = split.measure(Session((), ("backward",), CPU), SMALL[0])
    assert cell["selected"]["error"] == "RuntimeError: no such kernel" and cell["selected"]["us"] is None
    assert all(each["us"] > 0 for each in cell["splits"]) and split.ratio(cell) is None
    assert cell["selected"]["errors"] == {}


def test_without_two_kernels_there_is_no_ratio(fake, monkeypatch):
    """As the user's tables may have it."""
    plan = split.plans_of(SMALL[0], planning.device())[1]
    monkeypatch.setattr(launch, "plan_for", lambda problem: plan)
    cell = split.measure(Session((), ("backward",), CPU), SMALL[0])
    assert cell["selected"]["error"].startswith("the selector splits here") and split.ratio(cell) is None


# The command


def test_the_result_has_every_cell(cpu_as_gpu, tmp_path, capsys):
    assert split.main(["--out", str(tmp_path / "new")]) == 0
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "2026-11-27-bfloat16-split.json"
    result = json.loads(path.read_text())
    assert {key: result[key] for key in ORIGIN} == ORIGIN
    assert [(cell["rows"], cell["cols"]) for cell in result["cells"]] == SMALL == cpu_as_gpu
    for cell in result["cells"]:
        assert cell["size"] == "small" and split.ratio(cell) > 0
        for each in (cell["selected"], *cell["splits"]):
            assert set(each) == set(make_side(1.0)) and set(each["errors"]) == {"dx", "dw"}
            assert each["us_p10"] <= each["us"] <= each["us_p90"]
    out = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, driver 580.1" in out and f"written: {path}" in out
    for m in split.ROWS:
        assert re.search(rf"^{m}( +\d+\.\d\d){{2}}$", out, re.MULTILINE), out


def test_results_go_to_the_folder_of_the_gpu_and_are_none_to_the_gate(cpu_as_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(split, "RESULTS", tmp_path)
    assert split.main([]) == 0
    assert [path.parent.name for path in tmp_path.glob("*/*.json")] == ["nvidia-h100-80gb-hbm3"]
    assert gate.kept_gpus(tmp_path) == [] and gate.load_kept(ORIGIN["gpu"], tmp_path) == []
    assert [each["date"] for each in split.kept(tmp_path)] == [ORIGIN["date"]]


def test_a_failure_ends_with_status_1(cpu_as_gpu, fake, tmp_path, capsys):
    fake.is_wrong = staticmethod(lambda plan: plan.problem.n == 32 and not isinstance(plan.first, Split))
    assert split.main(["--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("failed: ") == 2 and "failed: 1040x32 by backward_tiles" in out
    assert re.search(r"^1040 +\d+\.\d\d +-$", out, re.MULTILINE), out


def test_a_lost_context_keeps_the_cells_before_it(cpu_as_gpu, tmp_path, monkeypatch, capsys):
    measure, seen = split.measure, []

    def lose_the_third(session, shape):
        seen.append(shape)
        if len(seen) == 3:
            raise ContextLostError("backward_split", "illegal memory access")
        return measure(session, shape)

    monkeypatch.setattr(split, "measure", lose_the_third)
    assert split.main(["--out", str(tmp_path)]) == 1
    assert seen == SMALL[:3]
    [path] = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["cells"]) == 2
    captured = capsys.readouterr()
    assert "2064x16: the CUDA context is lost" in captured.out + captured.err


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert split.main(["--out", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "nothing was measured: this compares kernels on a GPU, and PyTorch sees none"
    )
    assert not captured.out and not (tmp_path / "none").exists()


@pytest.mark.parametrize("arguments", [["--out", ""], ["--in", "x"], ["results"]])
def test_wrong_arguments_end_with_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        split.main(arguments)
    assert ended.value.code == 2


def test_a_folder_that_cannot_be_written_is_named_first(cpu_as_gpu, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert split.main(["--out", str(tmp_path / "file")]) == 1
    assert "no results can be kept there" in capsys.readouterr().err and not cpu_as_gpu


# The page


def test_docs_replaces_what_is_between_the_markers_and_nothing_else(tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(MARKED)
    write(make_result(), results)
    write(make_result((90.0, 60.0), gpu="NVIDIA H200"), results)
    for _ in range(2):
        assert split.refresh_page(page, results) == 0
    text = page.read_text()
    begin, end = text.index("<!-- split:begin -->"), text.index("<!-- split:end -->")
    assert (
        text[:begin] == "before\n\n" and text[end:] == "<!-- split:end -->\n\nafter\n" and "old" not in text
    )
    h100, h200 = text[begin:end].split("**NVIDIA H200.**")
    assert len(re.findall(r"0\.62(?= \|)", h100)) == 35 and len(re.findall(r"1\.50(?= \|)", h200)) == 35
    assert (
        "0.62 to 0.62. Two kernels are faster in 35 of 35 cells." in h100
        and "faster in 0 of 35 cells" in h200
    )
    for part in (h100, h200):
        assert "driver 580.1, CUDA 13.0, tileiras 13.4.92" in part and "2026-11-27" in part
        assert re.search(r"^\| 65536 +\|", part, re.MULTILINE)
        assert re.search(r"^\| M, N +\| +256 \| +512 \| +1024 \|", part, re.MULTILINE)
    assert str(page) in capsys.readouterr().out


def test_the_newest_kept_result_of_each_gpu_is_shown(tmp_path):
    old, new = (
        make_result((us, 100.0), date=f"2026-11-{day}T10:00:00+00:00") for us, day in ((70.0, 28), (80.0, 29))
    )
    for each in (new, old):
        write(each, tmp_path)
    write(make_result(), tmp_path / "partial")
    write(make_result(gpu=None), tmp_path)  # cpu/
    split.write_json(
        make_result(gpu="NVIDIA H200"), tmp_path / "ci" / "2026-11-30-bfloat16-split.json", "cells"
    )
    split.write_json(
        {**ORIGIN, "records": []}, tmp_path / gpu_slug(ORIGIN["gpu"]) / "2026-11-30-bfloat16.json"
    )
    assert split.kept(tmp_path) == [new]


def test_without_results_the_page_stays_as_it_is(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    assert split.refresh_page(page, tmp_path) == 1
    assert page.read_text() == MARKED and "python -m bench.split" in capsys.readouterr().err


def test_docs_is_of_the_page_and_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(split, "refresh_page", lambda: 7)
    monkeypatch.setattr(split, "measure_all", None)
    assert split.main(["--docs"]) == 7


def test_a_cell_without_a_time_is_a_dash():
    result = make_result((50.0, 100.0), shapes=SMALL)
    result["cells"][1]["selected"] = make_side(None)
    result["cells"][2]["splits"] = [make_side(None)]
    assert [line.split() for line in split.table(result, "simple").splitlines()[2:]] == [
        ["1040", "0.50", "-"],
        ["2064", "-", "0.50"],
    ]
    assert split.summary(result).endswith("faster in 2 of 2 cells.")
    assert split.failures(result) == [
        "failed: 1040x32 by some_kernel: broken",
        "failed: 2064x16 by some_kernel: broken",
    ]


def test_the_page_shows_what_is_kept():
    """Figures are never typed by hand: `python -m bench.split --docs` writes them."""
    text = split.PAGE.read_text()
    [shown] = re.findall(r"<!-- split:begin -->\n(.*)<!-- split:end -->", text, re.DOTALL)
    assert shown.strip() == split.page_section(split.kept())


@pytest.mark.parametrize("result", split.kept(), ids=lambda result: gpu_slug(result["gpu"]))
def test_kept_results_are_whole(result):
    assert [(cell["rows"], cell["cols"]) for cell in result["cells"]] == SHAPES
    assert not split.failures(result) and None not in map(split.ratio, result["cells"])
