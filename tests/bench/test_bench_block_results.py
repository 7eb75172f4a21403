# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's ops of a transformer block: the command, what it writes, the gate and the pages."""

from __future__ import annotations

import csv
import itertools
import json
import sys

import pytest
import torch
from bench_records import cell, make_block, make_record, make_result
from block_cases import right
from fake_peers import FAKES

from bench import gate, run
from bench.block import cell as block_cell
from bench.block import families
from bench.block import peers as block_peers
from bench.block.families import BLOCK_OPS, CONTROLS, Section
from bench.measure import processes, warm
from bench.measure.provenance import RESULTS, gpu_slug
from bench.measure.shapes import DEFAULT_SHAPES, OPS
from bench.report import html_report, overview, plots, readme, tables

H100 = "NVIDIA H100 80GB HBM3"


# The command


def sections(*options, has_gpu=True):
    return run.choose_sections(run.parse_arguments(list(options)), has_gpu)


def test_without_a_word_plain_ops_are_measured_alone():
    assert sections() == [Section(OPS, DEFAULT_SHAPES)]
    assert sections("--op", "dx,forward") == [Section(("dx", "forward"), DEFAULT_SHAPES)]


def test_each_family_has_shapes_of_its_own():
    found = sections("--block")
    assert [op for section in found for op in section.ops] == list(BLOCK_OPS)
    assert [section.shapes for section in found] == [family.shapes for family in families.FAMILIES]
    assert sections("--block", "--quick")[2].shapes == families.QUICK_STRIDED
    assert sections("--block", has_gpu=False)[0].shapes == families.CPU_HIDDEN
    assert sections("--block", "--shapes", "4x8")[4].shapes == ((4, 8),)
    mixed = sections("--op", "residual_forward,forward")
    assert mixed == [
        Section(("forward",), DEFAULT_SHAPES),
        Section(("residual_forward",), families.HIDDEN + families.FEW_ROWS),
    ]


def test_triton_is_measured_at_heads_where_it_is_asked_for():
    [section] = sections("--op", "qk_norm")
    assert (
        section.without == ("triton",)
        and sections("--op", "qk_norm", "--provider", "triton")[0].without == ()
    )
    assert sections("--op", "bias_forward")[0].without == ()


def test_a_group_stands_for_its_ops():
    assert run.parse_arguments(["--op", "qk_norm,dx"]).op == ("qk_norm_forward", "qk_norm_backward", "dx")
    assert run.parse_arguments(["--op", "qk_norm_backward,qk_norm"]).op == (
        "qk_norm_backward",
        "qk_norm_forward",
    )


def test_an_op_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(["--op", "residual"])
    assert "argument --op: expected some of forward, backward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        (("--block",), True),
        (("--block", "--op", "residual_forward"), False),
        (("--op", ",".join(BLOCK_OPS)), False),
    ],
)
def test_only_all_of_them_are_kept(options, is_kept):
    folder = run.default_folder(run.parse_arguments(list(options)), H100)
    assert folder == (RESULTS if is_kept else RESULTS / "partial") / gpu_slug(H100)


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """main, called with some options, with a provider that is right in place of each; its result."""
    monkeypatch.setattr(run, "why_not_measured", dict)
    monkeypatch.setattr(block_cell, "make_providers", lambda name, *_: [right(name)])
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(html_report, "why_none", lambda: "not here")

    def main(*options):
        assert run.main(["--out", str(tmp_path), "--block", *options]) == 0
        (path,) = tmp_path.glob("*-bfloat16-block.json")
        return path, json.loads(path.read_text())

    return main


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures as where there is no GPU")
def test_one_command_measures_every_family_and_writes(measuring, capsys):
    path, result = measuring("--quick", "--provider", "torch,cutile")
    assert result["is_block"] and not result["is_grid"]
    cells = [(each["op"], each["rows"], each["cols"], each["provider"]) for each in result["records"]]
    assert cells == [
        (op, *family.cpu_shapes[0], name)
        for family in families.FAMILIES
        for op in family.ops
        for name in ("torch", "cutile")
    ]
    assert all(each["us"] > 0 and each["error"] is None for each in result["records"])
    rows = list(csv.DictReader(path.with_suffix(".csv").open()))
    assert {row["op"]: bool(row["db_error"]) for row in rows}["bias_backward"] and len(rows) == len(cells)
    assert not list(path.parent.glob("*.png")), "without a GPU"
    pictures = plots.plot_result(result | {"gpu": H100}, path.with_suffix(""))
    assert {op for op in pictures if not op.endswith("-map")} == set(BLOCK_OPS) - set(CONTROLS.values())
    text = capsys.readouterr().out
    assert all(f"{op}, bfloat16: largest error" in text for op in BLOCK_OPS)


@pytest.mark.parametrize(
    ("options", "name", "is_block"),
    [
        (("--op", "bias_forward"), "-block", True),
        (("--op", "bias_forward", "--part"), "", True),  # processes.py finds its parts by this name
        (("--op", "bias_forward,forward"), "", False),
    ],
)
def test_results_of_these_ops_alone_are_of_this_kind(options, name, is_block, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(html_report, "why_none", lambda: "not here")
    assert run.main(["--out", str(tmp_path), "--provider", "torch", "--shapes", "4x8", *options]) == 0
    [path] = tmp_path.glob("*.json")
    assert path.stem.endswith(f"-bfloat16{name}") and json.loads(path.read_text())["is_block"] is is_block


def test_without_a_word_these_ops_are_of_kernels_and_of_pytorch(monkeypatch):
    monkeypatch.setattr(run, "why_not_measured", dict)
    providers, _ = run.choose_providers(run.parse_arguments(["--block"]), has_gpu=True)
    assert providers == ("cutile", "triton", "F.rms_norm", "torch.compile")


def test_a_whole_run_stays_short(monkeypatch):
    """Each setting of an op takes a fifteenth of a second to time, a shape some seconds to load and check."""
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    monkeypatch.setattr(run, "why_not_measured", dict)
    for library in block_peers.LIBRARIES:
        for name, made in FAKES[library]().items():
            monkeypatch.setitem(sys.modules, name, made)
    arguments = run.parse_arguments(["--block", "--peers"])
    names, _ = run.choose_providers(arguments, has_gpu=True)
    timed = 0
    for section in run.choose_sections(arguments, has_gpu=True):
        family = families.family_of(section.ops[0])
        kept = [name for name in names if name not in section.without]
        for shape, name in itertools.product(section.shapes, kept):
            found = block_peers.make_providers(name, family, shape, torch.bfloat16, torch.device("cpu"))
            pdl = 2 if name.startswith("torch.compile") else 1  # which a CPU has not
            timed += pdl * sum(op in section.ops for each in found for op in each.ops)
    assert 600 < timed < 800


def test_without_a_word_a_run_leaves_triton_out_at_heads(measuring):
    _, result = measuring("--quick")
    found = {(each["op"], each["provider"]) for each in result["records"]}
    assert ("bias_forward", "triton") in found and ("qk_norm_forward", "cutile") in found
    assert ("qk_norm_forward", "triton") not in found


def test_peers_are_those_that_have_such_ops(monkeypatch):
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    providers, _ = run.choose_providers(run.parse_arguments(["--block", "--peers"]), has_gpu=True)
    assert "tilegym" not in providers and {"quack", "liger.triton", "torch.compile", "F.rms_norm"} <= set(
        providers
    )


def test_compiling_ahead_makes_the_first_calls_of_these_ops(monkeypatch):
    done = []

    def providers(name, family, shape, dtype, device):
        calls = {op: (lambda t, op=op: done.append((op, t.x.shape[-1]))) for op in BLOCK_OPS}
        return [block_cell.BlockProvider(name, calls, str(number)) for number in range(3)]

    monkeypatch.setattr(block_cell, "make_providers", providers)
    task = warm.Task("quack", (4, 8), torch.float32, 1, ("residual_forward", "residual_backward"))
    warm.first_calls(task, torch.device("cpu"))
    assert done == [("residual_forward", 8), ("residual_backward", 8)], (
        "of four processes the second has one of three settings"
    )
    done.clear()
    warm.first_calls(warm.Task("quack", (4, 8), torch.float32, 0, ("bias_forward",)), torch.device("cpu"))
    assert done == [("bias_forward", 8)] * 3, "where few settings are tried one process has all"


# The gate


def test_results_are_compared_with_those_of_their_kind(tmp_path, capsys):
    kept, new = tmp_path / "kept", tmp_path / "new"
    plain, other = make_result(make_record(100.0)), make_block(make_record(100.0, op="bias_forward"))
    tables.write_json(plain, kept / gpu_slug(H100) / "2026-11-20-bfloat16.json")
    tables.write_json(make_block(make_record(200.0, op="bias_forward")), new / "a.json")
    options = [str(new), "--results", str(kept)]
    assert gate.main(options) == 0
    assert f"nothing compared: no kept results of this kind of {H100}" in capsys.readouterr().out
    tables.write_json(other, kept / gpu_slug(H100) / "2026-11-20-bfloat16-block.json")
    assert gate.main(options) == 1
    assert "bias_forward 4096x1024 bfloat16: 100.0 us before, 200.0 us now" in capsys.readouterr().out
    tables.write_json(plain, new / "a.json")
    tables.write_json(other, new / "b.json")
    assert gate.main(options) == 0
    assert capsys.readouterr().out.count("1 cells compared") == 2, "each with its own"


def test_results_of_two_kinds_are_not_joined():
    one, two = make_result(make_record()), make_block(make_record())
    assert processes.why_apart(one, two) == "is_block: False and True"
    assert len(gate.joined([one, two, two])) == 2


# The pages


def test_pages_keep_the_kinds_apart(tmp_path):
    paths = []
    kinds = {"-grid": {"is_grid": True}, "": {}, "-block": {"is_block": True}}
    for name, changes in kinds.items():
        op = "residual_forward" if name == "-block" else "backward"
        paths.append(tmp_path / gpu_slug(H100) / f"2026-11-21-bfloat16{name}.json")
        tables.write_json(make_result(*cell(100.0, 150.0, op), **changes), paths[-1])
    found = readme.kept_results(tmp_path)
    assert [path.stem.removeprefix("2026-11-21-bfloat16") for path in found] == ["", "-block", "-grid"]
    results = readme.load(found)
    assert overview.result_shown(results.values()) == results[found[0]]
    assert "of a transformer block" in readme.index(results)
    lines = readme.readme_section(results).splitlines()[2:4]
    assert [[each.strip() for each in line.split("|")[1:-1]] for line in lines] == [
        [f"{H100}, bfloat16", "1", "1.50", "1.50", "1 of 1", "", "", ""],
        [f"{H100}, bfloat16, residual", "1", "", "", "", "1.50", "1.50", "1 of 1"],
    ]
    sections = readme.page_sections(results)
    assert "residual_forward" in sections["block"] and "residual_forward" not in sections["behind"]
    pages = list(readme.result_pages(results).values())
    assert ["residual_forward" in page for page in pages] == [False, True, False]
    assert sections["overview"].count(H100) == 1
