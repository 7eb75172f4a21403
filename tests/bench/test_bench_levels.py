# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Levels of reproducibility in the benchmark: who runs under which, what one costs, and which a result names."""

import pytest
import torch
from bench_records import make_record, make_result
from helpers import why_skip
from levels import NotedLevels

from bench import gate, run
from bench.block.families import FAMILIES
from bench.measure import cell, processes
from bench.measure.provenance import RESULTS, describe_run, gpu_slug, one_line
from bench.measure.run_shape import Bench
from bench.measure.shapes import OPS, level_of
from bench.providers.ours import LEVELLED, backend_of
from bench.report import html_report, levels, plots, readme, tables
from bench.train.__main__ import main as train
from tilegym_rmsnorm import get_reproducible, reproducible
from tilegym_rmsnorm.measure.timer import Timing

CPU, BF16 = torch.device("cpu"), torch.bfloat16


# Who runs under which level


@pytest.mark.parametrize(
    ("provider", "flags"),
    [
        ("cutile", 0),
        ("cutile[batch]", 1),
        ("cutile[device]", 3),
        ("triton[batch]", 1),
        ("triton[device]", 3),
        ("triton[vllm]", 5),
    ],
)
@pytest.mark.parametrize("ops", [OPS, ("scaled_residual_backward",)], ids=["plain", "block"])
def test_every_call_of_a_provider_runs_under_its_level(ops, provider, flags, known_kernels, monkeypatch):
    """Those that check, those that are timed, and backwards that no public function calls."""
    if reason := why_skip(backend_of(provider), CPU):
        pytest.skip(reason)
    noted = NotedLevels(monkeypatch)
    records = Bench((provider,), ops, CPU).measure((4, 16), BF16, lambda step: None)
    assert {each["op"] for each in records} == set(ops) and {each["provider"] for each in records} == {
        provider
    }
    assert all(each["error"] is None and each["us"] > 0 for each in records)
    seen = noted.take()
    assert {each for of_pass in seen for each in of_pass} == {flags} and seen[1]
    assert get_reproducible() == "run"


def test_what_serves_is_named_under_the_level(known_kernels):
    """Few rows by the kernel for many: the level leaves no choice by them."""
    few, many = (
        Bench(("cutile", "cutile[batch]"), ("backward",), CPU).measure((rows, 4096), BF16, lambda step: None)
        for rows in (1, 8)
    )
    assert few[1]["settings"] == many[1]["settings"] != few[0]["settings"]


def test_the_option_adds_the_levels_of_what_is_measured(monkeypatch, tmp_path):
    """In the process of the backends, which that of tilegym is not."""
    groups, made = [], []

    class Nothing:
        copy_bytes_per_second, ops = None, OPS

        def __init__(self, providers, ops, device):
            self.providers = providers

        def measure(self, shape, dtype, progress):
            made.append(self.providers)
            return [make_record(provider=name) for name in self.providers]

    monkeypatch.setattr(run, "Bench", Nothing)
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    monkeypatch.setattr(run, "measure_others", lambda given, *_: groups.extend(given))
    options = ["--shapes", "4x8", "--out", str(tmp_path), "--levels", "--provider"]
    assert run.main([*options, "cutile,tilegym"]) == 0
    assert made == [("cutile", "cutile[batch]", "cutile[device]")] and groups == [(("tilegym",), ((4, 8),))]
    run.main([*options, "triton,torch"])
    assert made[1] == ("triton", "torch", "triton[batch]", "triton[device]", "triton[vllm]")
    asked = run.choose_providers(run.parse_arguments(["--block"]), has_gpu=True)[0]
    assert not LEVELLED.keys() & set(asked)


@pytest.mark.parametrize("options", [["--levels"], ["--provider", "cutile,cutile[batch]"]])
def test_levels_are_compared_with_run_alone(options, capsys):
    run.parse_arguments(options)
    with reproducible("device"), pytest.raises(SystemExit, match="2"):
        run.parse_arguments(options)
    assert "--levels: expected the level 'run' in effect, got 'device'" in capsys.readouterr().err


# What a level costs


def test_the_ratio_is_to_the_backend_without():
    device = {
        name: Timing(us, us, us, 31)
        for name, us in {
            "cutile": 100.0,
            "triton": 50.0,
            "cutile[batch]": 112.0,
            "cutile[device]": 90.0,
        }.items()
    }
    ratios = {name: cell._level_ratio(name, device) for name in (*device, "triton[batch]")}
    expected = {
        "cutile": None,
        "triton": None,
        "cutile[batch]": 1.12,
        "cutile[device]": 0.9,
        "triton[batch]": None,
    }
    assert ratios == expected
    del device["cutile"]
    assert cell._level_ratio("cutile[batch]", device) is None, "it was wrong, or not asked for"


def under(ratio, provider="cutile[batch]", **changes):
    return make_record(100.0 * ratio, provider=provider, level_ratio=ratio, **changes)


def costly():
    """The backward of a call of 200 MB, and the forward of one of 98 MB."""
    small = {"op": "forward", "rows": 2000}
    return make_result(
        *(make_record(), under(1.11), under(1.10, "cutile[device]")),
        *(make_record(**small), under(1.26, **small), under(1.25, "cutile[device]", **small)),
    )


def test_more_than_a_level_may_cost_is_marked():
    header, _, *lines = levels.table(costly()).splitlines()
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in (header, *lines)]
    assert cells == [
        ["op", "rows x cols", "cutile[batch]", "cutile[device]"],
        ["backward", "4096 x 1024", "1.11 > 1.10", "1.10"],
        ["forward", "2000 x 1024", "1.26 > 1.25", "1.25"],
    ]
    assert levels.table(make_result(make_record())) == "" and levels.summary(make_result(make_record())) == []


def test_the_gate_names_what_costs_more_and_does_not_fail(tmp_path, capsys):
    tables.write_json(costly(), tmp_path / "new.json")
    assert gate.main([str(tmp_path / "new.json"), "--results", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "may cost" in line]
    above = "gate: above what a level may cost: cutile[batch]"
    assert lines == [
        f"{above} backward 4096x1024 bfloat16: 1.11 times its backend without, the aim is 1.10",
        f"{above} forward 2000x1024 bfloat16: 1.26 times its backend without, the aim is 1.25",
    ]


def test_the_gate_says_what_the_order_of_vllm_costs(tmp_path, capsys):
    """Nothing is aimed at, and no table has a mark."""
    small = {"op": "forward", "rows": 2000}
    records = [under(1.02, "triton[vllm]"), under(3.5, "triton[vllm]", rows=9)]
    result = make_result(*records, under(1.4, "triton[vllm]", **small))
    assert "3.50" in levels.table(result) and ">" not in levels.table(result)
    tables.write_json(result, tmp_path / "new.json")
    assert gate.main([str(tmp_path / "new.json"), "--results", str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "aim" in line] == [
        "gate: no aim: triton[vllm] backward: 1.02 to 3.50 times its backend without, in 2 cells",
        "gate: no aim: triton[vllm] forward: 1.40 to 1.40 times its backend without, in 1 cells",
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_order_of_vllm_is_measured_where_it_is_defined(family):
    """A bias raises there, which would end the run as a failure."""
    if reason := why_skip("triton", CPU):
        pytest.skip(reason)
    shape = family.cpu_shapes[0]
    records = Bench(("triton", "triton[vllm]"), family.ops, CPU).measure(shape, BF16, lambda step: None)
    assert all(each["error"] is None and each["us"] > 0 for each in records)
    ops = {
        name: {each["op"] for each in records if each["provider"] == name}
        for name in ("triton", "triton[vllm]")
    }
    assert ops["triton"] - ops["triton[vllm]"] == {op for op in family.ops if op.startswith("bias")}


def test_the_gate_fails_where_a_level_becomes_slower():
    kept = [make_result(make_record(), under(1.05))]
    assert gate.compare(make_result(make_record(), under(1.06)), kept).failed == []
    assert len(gate.compare(make_result(make_record(), under(1.2)), kept).failed) == 1
    verdict = gate.compare(make_result(make_record()), kept)
    assert verdict.failed == [] and "not run: cutile[batch]" in gate.explain(
        make_result(make_record()), kept, verdict
    )


def test_pages_have_the_ratios_and_pictures_do_not(tmp_path, monkeypatch):
    path = RESULTS / "nvidia-h100-80gb-hbm3" / "2026-11-21-bfloat16.json"
    [(_, page)] = readme.result_pages({path: costly()}).items()
    assert "| backward | 4096 x 1024   |     1.11 > 1.10 |" in page
    [(_, page)] = readme.result_pages({path: make_result(make_record())}).items()
    assert "Levels of reproducibility" not in page
    drawn = []
    monkeypatch.setattr(plots, "_draw", lambda axes, provider, rates: drawn.append(provider))
    plots.plot_result(costly(), tmp_path / "a")
    assert set(drawn) == {"cutile"}


def test_the_page_of_a_run_has_the_ratios(tmp_path):
    pytest.importorskip("plotly", reason="plotly, which draws the page, is not installed")
    html_report.write([costly()], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "level / run" in text and ">1.11<" in text and '"name":"cutile[batch]"' not in text


# Which level a result names


def test_a_result_names_the_level_in_effect(monkeypatch):
    assert describe_run()["reproducible"] == "run" and "reproducible" not in one_line(describe_run())
    monkeypatch.setenv("TILEGYM_RMSNORM_REPRODUCIBLE", "device")
    with reproducible("batch"):
        result = describe_run()
    assert level_of(result) == "batch" and "under reproducible 'batch'" in one_line(result)
    assert html_report._facts(make_result(**result))["level of reproducibility"] == "batch"


def test_a_result_from_before_levels_is_of_run(tmp_path, capsys):
    old, new = make_result(make_record()), make_result(make_record(), reproducible="run")
    other = make_result(make_record(150.0), reproducible="batch")
    assert level_of(old) == "run" and processes.why_apart(old, new) is None
    assert processes.why_apart(old, other) == "reproducible: run and batch"
    tables.write_json(old, tmp_path / "kept" / gpu_slug(old["gpu"]) / "2026-11-20-bfloat16.json")
    path = tmp_path / "new.json"
    for result, text in ((new, "1 cells compared"), (other, "no kept results of")):
        tables.write_json(result, path)
        assert gate.main([str(path), "--results", str(tmp_path / "kept")]) == 0
        assert text in capsys.readouterr().out


def test_a_run_under_a_level_does_not_replace_kept_results():
    arguments = run.parse_arguments([])
    with reproducible("batch"):
        assert run.default_folder(arguments, "NVIDIA H200") == RESULTS / "partial" / "nvidia-h200"
    assert run.default_folder(arguments, "NVIDIA H200") == RESULTS / "nvidia-h200"


def test_training_under_a_level_does_not_replace_kept_results(monkeypatch):
    folders = []

    def refused(folder):
        folders.append(folder)
        return "the disk is full"

    monkeypatch.setattr("bench.train.__main__.why_not_writable", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    for level in ("run", "batch"):
        with reproducible(level), pytest.raises(SystemExit):
            train(["--model", "llama-1b", "--eager"])
    assert folders == [RESULTS / "nvidia-h200", RESULTS / "partial" / "nvidia-h200"]
