# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`bench/run.sh --widths SEED`: the widths that a seed draws, what is measured of them, the command."""

import json

import pytest
from bench_records import cell, make_block, make_record, make_result
from block_cases import right

from bench import gate, run
from bench.block import cell as block_cell
from bench.block.families import FAMILIES
from bench.measure import processes, widths
from bench.measure.provenance import RESULTS, gpu_slug
from bench.measure.shapes import DEFAULT_SHAPES, DTYPES, kind_of
from bench.report import html_report, plots

SEEDS = range(20)
H100 = "NVIDIA H100 80GB HBM3"


def sections(*options, has_gpu=True):
    return run.choose_sections(run.parse_arguments(["--widths", *options]), has_gpu)


# The draw


def test_a_seed_draws_the_same_widths_on_every_machine():
    drawn = widths.draw(1)
    assert [each[:5] for each in drawn] == [
        (4104, 736, 2920, 1520, 14880),
        (9884, 394, 430, 1900, 2012),
        (693, 117, 1401, 211, 399),
    ]
    assert widths.draw(1) == drawn != widths.draw(2)


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_widths_keep_the_rules(seed):
    drawn = widths.draw(seed)
    every = [width for kind in drawn for width in kind]
    assert [len(kind) for kind in drawn] == [30, 15, 15] and len(set(every)) == 60
    assert all(64 <= width <= 32768 for width in every)
    assert all(width % 8 == 0 for width in drawn.aligned) and all(width % 2 for width in drawn.odd)
    assert all(width % 2 == 0 and width % 8 for width in drawn.even)
    default = {cols for _, cols in DEFAULT_SHAPES}.union(*({cols for _, cols in f.shapes} for f in FAMILIES))
    assert not default.intersection(every)
    parts = {name: {widths.part_of(width) for width in kind} for name, kind in drawn._asdict().items()}
    assert parts == {"aligned": {"drawn"}, "even": {"unaligned"}, "odd": {"unaligned"}}


def test_narrow_widths_are_drawn_as_wide_ones_are():
    """Drawn evenly from all, one in seventy would have less than 512 columns."""
    every = [width for seed in SEEDS for width in widths.draw(seed).aligned]
    for narrowest in (64, 512, 4096):
        share = sum(narrowest <= width < narrowest * 8 for width in every) / len(every)
        assert 0.2 < share < 0.5


# What is measured


def test_every_part_is_measured_by_ops_of_the_other_runs():
    plain, residual, bias, heads = sections("3")
    assert [each.ops for each in (plain, residual, bias, heads)] == [
        ("forward", "backward"),
        ("residual_forward", "residual_backward"),
        ("bias_forward", "bias_backward"),
        ("qk_norm_forward", "qk_norm_backward"),
    ]
    found = [{widths.part_of(cols) for _, cols in each.shapes} for each in (plain, residual, bias, heads)]
    assert found == [{"drawn", "unaligned", "heads"}, {"drawn", "unaligned", "wide"}, {"wide"}, {"heads"}]
    assert {28672, 28671, 16392, 16393, 65536} < {cols for _, cols in bias.shapes}
    assert {rows for rows, _ in heads.shapes} == {65536, 262144, 1048576} and len(heads.shapes) == 9 * 3
    assert set(heads.shapes) < set(plain.shapes), "packed too"
    assert not any(section.without for section in sections("3"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_x_has_200_mb_and_20_mb_of_its_dtype(dtype):
    for section in sections("3", "--dtype", dtype):
        sizes: dict[int, list[int]] = {}
        for rows, cols in section.shapes:
            sizes.setdefault(cols, []).append(rows * cols * DTYPES[dtype].itemsize)
        for cols, found in sizes.items():
            if widths.part_of(cols) != "heads":
                assert found == [pytest.approx(size, rel=0.02) for size in (200e6, 20e6)]


def test_float32_has_the_unaligned_widths_alone():
    found = sections("3", "--dtype", "float32")
    assert [each.ops[0] for each in found] == ["forward", "residual_forward"]
    assert all(cols % 8 for each in found for _, cols in each.shapes) and len(found[0].shapes) == 60


def test_shares_are_the_whole_and_have_nothing_twice():
    whole = {(op, shape) for each in sections("3") for op in each.ops for shape in each.shapes}
    shares = [sections("3", "--share", f"{number}/3") for number in (1, 2, 3)]
    cells = [[(op, s) for each in share for op in each.ops for s in each.shapes] for share in shares]
    assert sorted(sum(cells, [])) == sorted(whole)
    for share in shares:  # each has some of every part
        assert len(share) == 4 and len({cols % 2 for _, cols in share[2].shapes}) == 2


def test_ops_and_quick_choose_a_part():
    [residual] = sections("3", "--op", "residual_backward")
    assert residual.ops == ("residual_backward",) and len(residual.shapes) == len(sections("3")[1].shapes)
    assert [len(each.shapes) for each in sections("3", "--quick")] == [3 * 2 + 3, 5 * 2, 2 * 2, 3]


# The command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "1", "--shapes", "4x8"], "--widths: expected none of --shapes, --block and --grid"),
        (["--widths", "1", "--block"], "--widths: expected none of --shapes, --block and --grid"),
        (
            ["--widths", "1", "--dtype", "bfloat16,float32"],
            "--widths: expected one --dtype, got bfloat16, float",
        ),
        (["--widths", "1", "--op", "both"], "--widths: --op and --share leave nothing to measure"),
        (["--share", "1/3"], "--share: expected --widths SEED beside it"),
        (["--widths", "1", "--share", "0/3"], "argument --share: expected K/N with K of 1 to N, got 0/3"),
        (["--widths", "1", "--share", "4/3"], "argument --share: expected K/N with K of 1 to N, got 4/3"),
        (["--widths", "1", "--share", "3"], "argument --share: expected K/N with K of 1 to N, got 3"),
    ],
)
def test_options_that_make_no_run_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        ((), True),
        (("--op", ",".join(widths.OPS)), True),
        (("--op", "forward"), False),
        (("--share", "1/3"), False),
        (("--quick",), False),
    ],
)
def test_only_a_whole_draw_is_kept(options, is_kept):
    folder = run.default_folder(run.parse_arguments(["--widths", "1", *options]), H100)
    assert folder == (RESULTS if is_kept else RESULTS / "partial") / gpu_slug(H100)


def test_who_is_measured(monkeypatch):
    monkeypatch.setattr(run, "why_not_measured", dict)
    monkeypatch.setattr(run, "why_missing", lambda name: None)
    arguments = run.parse_arguments(["--widths", "1", "--peers"])
    providers, _ = run.choose_providers(arguments, has_gpu=True)
    assert providers[:4] == ("cutile", "triton", "F.rms_norm", "torch.compile")
    assert {"quack", "liger.triton", "torch.compile-max-autotune"} < set(providers)
    assert "tilegym" not in providers and "torch" not in providers


@pytest.mark.parametrize(("options", "name"), [((), "-widths"), (("--share", "2/3"), "-widths-2-of-3")])
def test_one_command_measures_and_writes(options, name, monkeypatch, tmp_path):
    """A few rows of the first width of each kind, where there is no GPU."""
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(block_cell, "make_providers", lambda name, *_: [right(name)])
    monkeypatch.setattr(run, "run_in_interpreters", lambda: None)  # for the rest of this process
    monkeypatch.setattr(html_report, "why_none", lambda: "not here")
    command = ["--widths", "1", "--provider", "torch", "--out", str(tmp_path), *options]
    assert run.main(command) == 0
    [path] = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert path.stem.endswith(f"-bfloat16{name}") and kind_of(result) == "widths" and result["widths"] == 1
    expected = [
        (op, *shape)
        for section in run.choose_sections(run.parse_arguments(command), has_gpu=False)
        for shape in section.shapes
        for op in section.ops
    ]
    assert [(each["op"], each["rows"], each["cols"]) for each in result["records"]] == expected
    assert {widths.part_of(cols) for *_, cols in expected} == set(widths.PARTS)
    assert all(each["error"] is None and each["us"] > 0 for each in result["records"])


# Beside other results


def test_results_of_other_kinds_and_seeds_are_kept_apart():
    one = make_result(make_record(), widths=1)
    assert processes.why_apart(one, make_result(make_record(), widths=2)) == "widths: 1 and 2"
    assert processes.why_apart(one, make_result(make_record(), widths=1)) is None
    assert processes.why_apart(make_result(make_record()), make_result(make_record(), widths=None)) is None
    every = [one, make_result(make_record()), make_block(make_record())]
    assert len(gate.joined([*every, one])) == 3
    assert kind_of(make_block(make_record(), widths=0)) == "widths", "of one family alone, by seed 0"


def test_there_are_no_pictures_of_drawn_widths(tmp_path):
    assert plots.plot_result(make_result(*cell(1.0, 2.0, "forward"), widths=1), tmp_path / "a") == {}
