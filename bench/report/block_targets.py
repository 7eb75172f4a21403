# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Targets of a block's ops, each over a result's own cells. compare.py has those of the plain norm.

python -m bench.report.block_targets RESULT.json    a line for each target: met, NOT MET with the cells that miss
                                                    it, or open without cells; exit status 1 unless all are met
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate")

import argparse
import sys

from bench.block.families import BLOCK_OPS, CONTROLS
from bench.measure.shapes import DTYPES, Record, Result, kind_of, shape_text
from bench.report.cells import (
    LARGE_BYTES,
    Target,
    behind,
    compare,
    failed_cells,
    lines_of,
    moved,
    of_copy,
    of_mean,
    of_op,
)
from bench.report.text import read_result

LARGE_X = 64 << 20  # bytes of x
LARGE_HEADS = (128, 256)  # columns
RESIDUAL_SHARE = {"residual_forward": 0.95, "residual_backward": 0.93, "scaled_residual_backward": 0.93}
RESIDUAL_MEAN = {"residual_forward": 1.0, "residual_backward": 1.2}
RESIDUAL_LEAST = {"residual_forward": 0.985, "residual_backward": 1.0}
HEADS_SHARE = 0.93
MOST_COST = {"qk_norm_forward": 0.05, "qk_norm_backward": 0.05, "bias_forward": 0.01, "bias_backward": 0.03}


def targets(result: Result) -> list[Target]:
    """All of them; those without cells have none."""
    found = [_failed(op, result) for op in BLOCK_OPS]
    for op, share in RESIDUAL_SHARE.items():
        large = [each for each in of_op(result, op) if moved(each) >= LARGE_BYTES]
        found.append(of_copy(op, share, large, f"{LARGE_BYTES / 1e6:.0f} MB or more move"))
        if op in RESIDUAL_MEAN:
            cells = [each for each in compare(result, op) if op == "residual_backward" or each.ours in large]
            text = f"{op}: at least {RESIDUAL_LEAST[op]}x the best peer in every cell"
            found.append(of_mean(op, RESIDUAL_MEAN[op], cells))
            found.append(Target(text, len(cells), behind(cells, RESIDUAL_LEAST[op])))
    for op in ("qk_norm_forward", "qk_norm_backward"):
        wide = [each for each in of_op(result, op) if each["cols"] in LARGE_HEADS]
        large = [each for each in wide if _bytes_of_x(each) >= LARGE_X]
        where = f"x has {LARGE_X >> 20} MiB or more, of {' or '.join(map(str, LARGE_HEADS))} columns"
        found += [of_copy(op, HEADS_SHARE, large, where), _against_compiled(op, result)]
    return found + [_cost(op, most, result) for op, most in MOST_COST.items()]


def _failed(op: str, result: Result) -> Target:
    failed = failed_cells(result, op)
    return Target(f"{op}: cutile has a figure in every cell", len(of_op(result, op)) + len(failed), failed)


def _against_compiled(op: str, result: Result) -> Target:
    """torch.compile by either mode."""
    ours = {shape_text(each): each["us"] for each in of_op(result, op)}
    best: dict[str, float] = {}
    for each in result["records"]:
        is_compiled = each["op"] == op and each["provider"].startswith("torch.compile")
        if is_compiled and each["us"] is not None and shape_text(each) in ours:
            best[shape_text(each)] = min(each["us"], best.get(shape_text(each), each["us"]))
    missed = [f"{shape} ({us / ours[shape]:.3f}x)" for shape, us in best.items() if us <= ours[shape]]
    return Target(f"{op}: ahead of torch.compile in every cell", len(best), missed)


def _cost(op: str, most: float, result: Result) -> Target:
    """How much longer it takes than the op without bias or strides."""
    without = {shape_text(each): each["us"] for each in of_op(result, CONTROLS[op])}
    costs = {
        shape_text(each): each["us"] / without[shape_text(each)] - 1
        for each in of_op(result, op)
        if shape_text(each) in without
    }
    missed = [f"{shape} ({cost:+.1%})" for shape, cost in costs.items() if cost > most]
    return Target(f"{op}: at most {most:.0%} longer than {CONTROLS[op]}", len(costs), missed)


def _bytes_of_x(record: Record) -> int:
    return record["rows"] * record["cols"] * DTYPES[record["dtype"]].itemsize


def _of_a_block(text: str) -> Result:
    result = read_result(text)
    if kind_of(result) != "block":
        raise argparse.ArgumentTypeError(f"expected a result of bench/run.sh --block, got {text}")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.block_targets",
        description="Which targets a result of bench/run.sh --block meets.",
    )
    parser.add_argument("result", type=_of_a_block, metavar="RESULT.json")
    found = targets(parser.parse_args(argv).result)
    print("\n".join(lines_of(found, shows_open=True)))
    return int(not all(each.is_met for each in found))


if __name__ == "__main__":
    sys.exit(main())
