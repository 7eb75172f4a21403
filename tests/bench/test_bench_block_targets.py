# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The targets of the benchmark's ops of a transformer block, and the command that says which are met."""

from __future__ import annotations

import pytest
from bench_records import cell, make_block, make_record, make_result

from bench.block.families import CONTROLS
from bench.report import block_targets, compare, tables

H100 = "NVIDIA H100 80GB HBM3"


BASE = {"us": 100.0, "gb_per_s": 2900.0, "copy_fraction": 0.96}  # 290 MB


def verdict(text, *records):
    """Whether a target is met, by how it begins."""
    [target] = [each for each in compare.targets(make_block(*records)) if each.text.startswith(text)]
    return target.is_met


def test_targets_without_cells_are_open():
    assert {each.is_met for each in compare.targets(make_block(make_record(op="other")))} == {None}


@pytest.mark.parametrize(
    ("op", "share"),
    [("residual_forward", 0.95), ("residual_backward", 0.93), ("scaled_residual_backward", 0.93)],
)
def test_large_calls_with_a_residual_reach_a_share_of_the_copy(op, share):
    text = f"{op}: at least {share:.0%} of the copy"
    for found, met in ((share, True), (share - 0.001, False)):
        assert verdict(text, make_record(**BASE | {"op": op, "copy_fraction": found})) is met
    assert verdict(text, make_record(**BASE | {"op": op, "gb_per_s": 1999.0})) is None  # less than 200 MB


@pytest.mark.parametrize(
    ("op", "mean", "least"), [("residual_forward", 1.0, 0.985), ("residual_backward", 1.2, 1.0)]
)
def test_residuals_against_the_best_peer(op, mean, least):
    for ratio, met in ((mean, True), (mean - 0.01, False)):
        assert verdict(f"{op}: geometric mean", *cell(100.0, 100 * ratio, op)) is met
    for ratio, met in ((least, True), (least - 0.001, False)):
        cells = cell(100.0, 300.0, op, rows=8) + cell(100.0, 100 * ratio, op)
        assert verdict(f"{op}: at least {least}x", *cells) is met


@pytest.mark.parametrize("op", ["qk_norm_forward", "qk_norm_backward"])
def test_strided_heads(op):
    large = BASE | {"op": op, "rows": 1 << 18, "cols": 128}  # 64 MiB of x
    for share, met in ((0.93, True), (0.929, False)):
        assert verdict(f"{op}: at least 93%", make_record(**large | {"copy_fraction": share})) is met
    for other in ({"rows": (1 << 18) - 1}, {"cols": 192}):
        assert verdict(f"{op}: at least 93%", make_record(**large | other)) is None
    ahead = f"{op}: ahead of torch.compile"
    compiled = make_record(101.0, op=op, provider="torch.compile")
    assert verdict(ahead, make_record(100.0, op=op), compiled) is True
    faster = make_record(100.0, op=op, provider="torch.compile-max-autotune")
    assert verdict(ahead, make_record(100.0, op=op), compiled, faster) is False
    assert verdict(ahead, *cell(100.0, 50.0, op)) is None, "quack is none"


@pytest.mark.parametrize(
    ("op", "most"),
    [("qk_norm_forward", 5), ("qk_norm_backward", 5), ("bias_forward", 1), ("bias_backward", 3)],
)
def test_what_strides_and_bias_may_cost(op, most):
    for cost, met in ((most - 0.1, True), (most + 0.1, False)):
        without = make_record(100.0, op=CONTROLS[op])
        assert verdict(f"{op}: at most {most}% longer", make_record(100.0 + cost, op=op), without) is met
    elsewhere = make_record(100.0, op=CONTROLS[op], rows=8)
    assert verdict(f"{op}: at most", make_record(100.0, op=op), elsewhere) is None


def test_a_cell_that_cutile_fails_in_is_a_target_missed():
    assert verdict("bias_forward: cutile has a figure", make_record(None, op="bias_forward")) is False
    assert verdict("bias_forward: cutile has a figure", make_record(op="bias_forward")) is True


def test_the_summary_has_the_ops_and_their_targets():
    text = compare.summary(make_block(*cell(100.0, 120.0, "residual_backward")))
    assert "residual_backward: cutile against the best of quack" in text
    assert "met     residual_backward: geometric mean" in text and "deterministic dw" not in text


def test_a_command_says_which_targets_a_result_meets(tmp_path, capsys):
    path = tmp_path / "a.json"
    tables.write_json(make_block(*cell(100.0, 120.0, "residual_backward")), path)
    assert block_targets.main([str(path)]) == 1, "some are open"
    lines = capsys.readouterr().out.splitlines()
    assert "met     residual_backward: geometric mean over cells at least 1.2 (1 cells): 1.200" in lines
    assert "open    bias_forward: at most 1% longer than no_bias_forward (no cells)" in lines
    tables.write_json(make_block(*cell(100.0, 99.0, "residual_backward")), path)
    block_targets.main([str(path)])
    text = capsys.readouterr().out
    assert (
        "NOT MET residual_backward: at least 1.0x" in text and "missed by 4096 x 1024 (0.990x quack)" in text
    )
    tables.write_json(make_result(make_record()), path)
    with pytest.raises(SystemExit, match="2"):
        block_targets.main([str(path)])
    assert "expected a result of bench/run.sh --block, got" in capsys.readouterr().err


def test_all_targets_met_is_success(tmp_path, monkeypatch):
    met = [block_targets.Target("a", 1, []), block_targets.Target("b", 2, [])]
    monkeypatch.setattr(block_targets, "targets", lambda result: met)
    tables.write_json(make_block(make_record(op="bias_forward")), tmp_path / "a.json")
    assert block_targets.main([str(tmp_path / "a.json")]) == 0


def test_forwards_of_few_bytes_have_no_peer_to_beat():
    text = "residual_forward: geometric mean"
    assert verdict(text, *cell(100.0, 50.0, "residual_forward", gb_per_s=1999.0)) is None
    assert verdict(text, *cell(100.0, 50.0, "residual_forward", gb_per_s=2001.0)) is False
