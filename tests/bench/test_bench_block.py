# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's ops of a transformer block: inputs, bytes, the check against float64, the records; the command, what
it writes, the gate and the pages."""

import csv
import dataclasses
import itertools
import json
import sys

import pytest
import torch
from bench_records import RECORD_FIELDS, assert_golden, cell, make_block, make_record, make_result
from block_cases import EVERY_OP, SHAPE, measured, reason, right
from fake_peers import FAKES
from helpers import BF16, FP32

from bench import gate, run
from bench.block import cell as block_cell
from bench.block import families
from bench.block import peers as block_peers
from bench.block.cell import run_op
from bench.block.check import kind_of
from bench.block.families import (
    BLOCK_OPS,
    CONTROLS,
    FAMILIES,
    TOKENS,
    Section,
    by_family,
    compulsory_bytes,
    make_inputs,
)
from bench.block.providers import BlockProvider
from bench.measure import processes, shapes, warm
from bench.measure.provenance import RESULTS, gpu_slug
from bench.measure.run_shape import Bench
from bench.measure.shapes import DEFAULT_SHAPES, OPS
from bench.report import block as block_page
from bench.report import html_report, overview, plots, readme, tables

CPU = torch.device("cpu")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_op = pytest.mark.parametrize(("family", "op"), EVERY_OP, ids=[op for _, op in EVERY_OP])


# What is measured


def test_bytes_of_each_op():
    """A bf16 element with a residual takes 8, forward or backward, and 10 where two gradients are written."""
    rows, cols = 1 << 20, 256
    of_an_element = {op: compulsory_bytes(op, (rows, cols), BF16) / (rows * cols) for op in BLOCK_OPS}
    expected = {"forward": 4, "backward": 6}
    for op, found in of_an_element.items():
        most = {"residual_forward": 8, "residual_backward": 8, "scaled_residual_backward": 10}
        assert found == pytest.approx(most.get(op, expected[op.rpartition("_")[2]]), rel=0.01), op
    assert (
        compulsory_bytes("bias_backward", (1, 8), FP32) == 4 * (3 * 8 + 3 * 8) + 4
    )  # weight, dw and db; rstd
    assert compulsory_bytes("bias_forward", (1, 8), FP32) == 4 * (2 * 8 + 2 * 8) + 4
    assert compulsory_bytes("frozen_weight_backward", (2, 8), BF16) == 2 * (3 * 16 + 8) + 8
    assert compulsory_bytes("qk_norm_backward", (2, 8), BF16) == 2 * (3 * 16 + 2 * 8) + 8


def test_ops_by_family_plain_ones_first():
    ops = ("bias_backward", "dx", "residual_forward", "forward", "bias_forward")
    assert [(family and family.name, of) for family, of in by_family(ops)] == [
        (None, ("forward", "dx")),
        ("residual", ("residual_forward",)),
        ("bias", ("bias_forward", "bias_backward")),
    ]
    assert [family for family, _ in by_family(BLOCK_OPS)] == list(FAMILIES)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 24, 4096 * 4 * 28])
def test_rows_of_heads(rows):
    b, t, h = families.heads_of(rows)
    assert b * t * h == rows and min(b, t, h) >= 1


@every_family
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_inputs_are_what_models_have(family, dtype):
    one, two = make_inputs(family, SHAPE, dtype, CPU, sets=2)
    assert one.x.shape == one.dy.shape and one.x.numel() == SHAPE[0] * SHAPE[1] and one.rstd.shape == (24,)
    assert not torch.equal(one.x, two.x) and len({t.data_ptr() for t in (one.x, two.x, one.dy, two.dy)}) == 4
    assert (one.residual is not None) == (one.d_residual_out is not None) == family.has_residual
    assert (one.bias is not None) == family.has_bias
    exact = (one.normalized.double().square().mean(-1) + 1e-6).rsqrt().reshape(-1)
    torch.testing.assert_close(one.rstd.double(), exact, rtol=1e-5, atol=0)
    if family.has_residual:
        total = family.alpha * one.x.double() + one.residual.double()
        torch.testing.assert_close(one.normalized.double(), total, rtol=2**-7, atol=1e-4)
    if family.is_strided:
        b, t, h, cols = one.x.shape
        assert one.x.stride() == (t * 3 * h * cols, 3 * h * cols, cols, 1)
        assert one.dy.stride() == (h * t * cols, cols, t * cols, 1) and min(b, t, h) > 1
        assert torch.equal(one.packed, one.x.reshape(-1, cols)) and torch.equal(
            one.packed_dy, one.dy.reshape(-1, cols)
        )
        assert one.packed.is_contiguous() and one.packed_dy.is_contiguous()


# The check


@every_op
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_right_passes(family, op, dtype):
    (inputs,) = make_inputs(family, SHAPE, dtype, CPU, sets=1)
    assert reason(family, run_op(family, right(), op, inputs), inputs) is None


@every_op
def test_one_wrong_element_is_found(family, op):
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    outputs = run_op(family, right(), op, inputs)
    for name, tensor in outputs.items():
        wrong = tensor.clone(memory_format=torch.contiguous_format)
        rows = wrong.view(-1, wrong.shape[-1])
        rows[-1, rows[-1].abs().argmax()] *= 1.1
        text = reason(family, outputs | {name: wrong}, inputs)
        assert text is not None and text.startswith(f"{kind_of(name)} has a relative error of")
        wrong.view(-1)[0] = torch.nan
        assert reason(family, outputs | {name: wrong}, inputs)


FORGOTTEN = {
    "residual_forward": ("residual", ("y", "residual_out", "rstd")),
    "residual_backward": ("d_residual_out", ("dx",)),
    "scaled_residual_backward": ("d_residual_out", ("dx", "d_residual")),
    "bias_forward": ("bias", ("y",)),
}


@pytest.mark.parametrize("op", FORGOTTEN)
def test_an_input_that_is_not_read_is_found(op):
    forgotten, wrong = FORGOTTEN[op]
    family = families.family_of(op)
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    others = dataclasses.replace(inputs, **{forgotten: torch.zeros_like(getattr(inputs, forgotten))})
    text = reason(family, run_op(family, right(), op, others), inputs)
    assert text is not None and all(f"{name} has a relative error" in text for name in wrong)


def test_a_branch_that_is_not_multiplied_is_found():
    family = families.family_of("scaled_residual_backward")
    (inputs,) = make_inputs(family, SHAPE, FP32, CPU, sets=1)
    outputs = run_op(family, right(), "scaled_residual_backward", dataclasses.replace(inputs, alpha=1.0))
    text = reason(family, outputs, inputs)
    assert text is not None and text.startswith("dx has") and "d_residual" not in text


def test_the_sum_may_be_normalized_before_it_is_rounded_by_peers_alone():
    family = families.family_of("residual_forward")
    (inputs,) = make_inputs(family, (64, 1024), BF16, CPU, sets=1)
    outputs = run_op(family, right(), "residual_forward", inputs)
    total = inputs.x.double() + inputs.residual.double()
    outputs["residual_forward rstd"] = (total.square().mean(1) + 1e-6).rsqrt().float()
    assert "rstd has" in reason(family, outputs, inputs)
    assert reason(family, outputs, inputs, lenient=("it",)) is None
    outputs["residual_forward rstd"] *= 1.001
    assert "rstd has" in reason(family, outputs, inputs, lenient=("it",))


def test_outputs_of_another_form_are_refused():
    family = families.family_of("bias_backward")
    (inputs,) = make_inputs(family, SHAPE, BF16, CPU, sets=1)
    dx, dw, db = right().calls["bias_backward"](inputs)
    for results in ((dx, dw, db.float()), (dx[1:], dw, db)):
        with pytest.raises(ValueError, match="bias_backward d[bx]: expected"):
            run_op(
                family,
                BlockProvider("it", {"bias_backward": lambda t, got=results: got}),
                "bias_backward",
                inputs,
            )


# Records


@every_family
def test_records_of_a_family(family, monkeypatch):
    records = measured(monkeypatch, family, right("one"), right("two"))
    assert [(each["op"], each["provider"]) for each in records] == [
        (op, name) for op in family.ops for name in ("one", "two")
    ]
    for record in records:
        assert set(record) == RECORD_FIELDS and record["error"] is None and record["us"] > 0
        moved = compulsory_bytes(record["op"], SHAPE, BF16)
        assert record["gb_per_s"] == pytest.approx(moved / record["us"] / 1e3, rel=0.01)
        assert set(record["errors"]) == {name for names in family.outputs.values() for name in names}


def test_a_backward_that_overwrites_dy_spoils_nobody_elses(monkeypatch):
    family = families.family_of("frozen_weight_backward")
    call = right().calls["frozen_weight_backward"]

    def in_place(t):
        (dx,) = call(t)
        return (t.dy.copy_(dx),)

    overwriting = BlockProvider("first", {"frozen_weight_backward": in_place}, overwrites_dy=True)
    records = measured(monkeypatch, family, overwriting, right("second"))
    assert [each["error"] for each in records] == [None, None]


def test_plain_ops_and_these_are_not_mixed_in_one_measurement():
    assert not set(OPS).intersection(BLOCK_OPS)
    with pytest.raises(ValueError):
        Bench(("torch",), ("forward", "bias_forward"), CPU).measure(SHAPE, BF16, print)


def test_the_page_of_a_result():
    """Ratios to the best peer and to the op without, rows by shape, heads as maps, settings; means of several GPUs."""
    records = [
        *cell(100.0, 150.0, "bias_forward", copy_fraction=0.9449),
        *cell(100.0, 90.0, "bias_forward", rows=8),
    ]
    records.append(make_record(120.0, op="bias_forward", provider="torch.compile"))
    records += [make_record(98.0, op="no_bias_forward"), make_record(101.0, op="no_bias_forward", rows=8)]
    records.append(make_record(None, op="bias_backward", rows=8))
    for heads, size, share in ((32, 128, 0.93), (8, 128, 0.8), (8, 64, 0.7)):
        shape = {"rows": TOKENS * heads, "cols": size, "copy_fraction": share}
        records += cell(100.0, 100.0 + size, "qk_norm_forward", "torch.compile", **shape)
        records.append(make_record(100 * share, op="contiguous_forward", **shape))
    for op in BLOCK_OPS:
        if op not in CONTROLS.values() and not any(each["op"] == op and each["us"] for each in records):
            records += cell(100.0, 110.0, op, rows=TOKENS * 8, cols=64, settings=f"some_kernel of {op}")
    result, other = make_block(*records), make_block(*cell(100.0, 120.0, "bias_forward"), gpu="NVIDIA H200")
    assert_golden(
        "\n\n".join([*block_page.page_parts(result), block_page.overview([result, other])]), "block.txt"
    )


def test_without_results_there_is_no_section(tmp_path):
    page, empty = tmp_path / "page.md", "a\n<!-- block:begin -->\n<!-- block:end -->\nb\n"
    page.write_text(empty.replace("<!-- block:end", "\nold\n\n<!-- block:end"))
    readme.refresh(page, "block", block_page.overview([]))
    assert page.read_text() == empty


def of_block():
    return [
        each for each in readme.load(readme.kept_results(RESULTS)).values() if shapes.kind_of(each) == "block"
    ]


@pytest.mark.parametrize("result", of_block(), ids=lambda result: gpu_slug(result["gpu"]))
def test_kept_results_are_whole(result):
    """Every op at each of its shapes, and which kernel served."""
    found = {
        (each["op"], each["rows"], each["cols"]): each
        for each in result["records"]
        if each["provider"] == "cutile"
    }
    assert set(found) == {(op, *shape) for family in FAMILIES for op in family.ops for shape in family.shapes}
    assert all(each["us"] and each["settings"] for each in found.values())
    assert {"quack", "torch.compile", "liger.triton"} <= {each["provider"] for each in result["records"]}


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
