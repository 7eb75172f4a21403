# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Pictures of a result for each op: GB/s over the shapes, and, if there are peers, two heat maps over rows and columns.

python -m bench.plots RESULT.json...       draws them again, beside the files
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import extra

    extra.require()

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import compare
from bench.heatmaps import plot_heatmaps
from bench.provenance import one_line
from bench.shapes import OPS
from tilegym_rmsnorm.commands import options

# Okabe and Ito's colours, which people who are colour-blind can tell apart; every provider has a marker too.
STYLES = {
    "cutile": ("#D55E00", "o"),
    "triton": ("#0072B2", "s"),
    "inductor": ("#009E73", "^"),
    "torch": ("#999999", "v"),
    "F.rms_norm": ("#000000", "x"),
    "torch.compile": ("#CC79A7", "D"),
    "cutile[P=M]": ("#E69F00", "P"),
    "torch.compile-max-autotune": ("#CC79A7", "d"),
    "quack": ("#56B4E9", "h"),
    "liger.cutile": ("#8B4513", "<"),
    "liger.cute": ("#8B4513", ">"),
    "liger.triton": ("#8B4513", "1"),
    "tilegym": ("#76B900", "p"),
    "torch.quack": ("#56B4E9", "H"),
}
OTHER_STYLE = ("#F0E442", "*")
EMPHASISED = "cutile"


def plot_result(result: dict[str, Any], stem: Path) -> dict[str, Path]:
    """Writes STEM-OP.png, GB/s, and STEM-OP-map.png, heat maps, for each op of the result but dx, a figure of the
    backward; of a grid STEM-OP.png, its heat maps. Returns the paths by op, and by OP-map."""
    paths = {}
    for op in OPS:
        if op == "dx":
            continue
        records = [
            record for record in result["records"] if record["op"] == op and record["gb_per_s"] is not None
        ]
        if records:
            paths[op] = stem.with_name(f"{stem.name}-{op}.png")
            if result.get("is_grid"):
                plot_heatmaps(result, op, paths[op])
                continue
            _plot_op(result, op, records, paths[op])
            if compare.compare(result, op):
                paths[f"{op}-map"] = stem.with_name(f"{stem.name}-{op}-map.png")
                plot_heatmaps(result, op, paths[f"{op}-map"])
    return paths


def _plot_op(result: dict[str, Any], op: str, records: list[dict[str, Any]], path: Path) -> None:
    shapes = list(dict.fromkeys((record["rows"], record["cols"]) for record in records))
    figure = Figure(figsize=(max(7.0, 2.0 + 0.42 * len(shapes)), 5.5), layout="constrained")
    axes = figure.subplots()
    for provider in dict.fromkeys(record["provider"] for record in records):
        rates = {(r["rows"], r["cols"]): r["gb_per_s"] for r in records if r["provider"] == provider}
        color, marker = STYLES.get(provider, OTHER_STYLE)
        is_ours = provider == EMPHASISED
        axes.plot(
            range(len(shapes)),
            [rates.get(shape, float("nan")) for shape in shapes],
            color=color,
            marker=marker,
            linewidth=2.5 if is_ours else 1.0,
            markersize=7 if is_ours else 5,
            zorder=3 if is_ours else 2,
            label=provider,
        )
    if result["copy_gb_per_s"] is not None:
        axes.axhline(result["copy_gb_per_s"], color="black", linestyle="--", linewidth=1, label="device copy")
    axes.set_xticks(
        range(len(shapes)), [f"{rows} x {cols}" for rows, cols in shapes], rotation=60, ha="right"
    )
    axes.set_ylabel("GB/s of compulsory bytes")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.suptitle(with_note(f"RMSNorm {op}, {records[0]['dtype']}", result))
    figure.supxlabel(one_line(result), fontsize=7)
    figure.savefig(path, dpi=120)


def with_note(title: str, result: dict[str, Any]) -> str:
    """The title of a plot, and under it the result's note if it has one."""
    return f"{title}\n{textwrap.fill(result['note'], 60)}" if result["note"] else title


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description="Draws results again.")
    parser.add_argument("result", type=options.path, nargs="+", metavar="RESULT.json")
    for path in parser.parse_args(argv).result:
        written = plot_result(json.loads(path.read_text()), path.with_suffix(""))
        print("\n".join(map(str, written.values())))


if __name__ == "__main__":
    main()
