# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Pictures of a result for each op: GB/s at every shape, and, if there are peers, two heat maps over rows and columns.

python -m bench.report.plots RESULT.json...       draws them again, beside the files
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require()

import argparse
import itertools
import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.block.families import ALL_OPS, CONTROLS
from bench.measure.shapes import BATCHES, WIDEST_HEAD, Record, Result, Shape, kind_of, shape_of
from bench.providers.ours import LEVELLED, OURS
from bench.report import compare, pictures
from bench.report.heatmaps import plot_heatmaps
from bench.report.styles import style_of
from tilegym_rmsnorm.commands import options

GROUP_GAP = 1.2  # lines between two groups of shapes, the first of which holds the group's name


def plot_result(result: Result, stem: Path) -> dict[str, Path]:
    """Write the pictures of each op: GB/s in STEM-OP.png, heat maps in STEM-OP-map.png. A grid has heat maps alone, in
    STEM-OP.png, drawn widths none. dx and CONTROLS have none of their own. Return the paths by op, and by OP-map.

    Without a GPU write none: the times of interpreters and busy cores say nothing about the kernels.
    """
    paths: dict[str, Path] = {}
    if result["gpu"] is None or kind_of(result) == "widths":  # of which nobody would find a line
        return paths
    for op in ALL_OPS:
        if op == "dx" or op in CONTROLS.values():
            continue
        of_op = (record for record in result["records"] if record["op"] == op)
        timed = [record for record in of_op if record["gb_per_s"] is not None]
        records = [record for record in timed if record["provider"] not in LEVELLED]
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


def _plot_op(result: Result, op: str, records: list[Record], path: Path) -> None:
    """A line for each shape: a bar for this package, a marker for everybody, a dashed line for the copy."""
    shapes = list(dict.fromkeys(map(shape_of, records)))
    places, groups = _places(shapes)
    providers = list(dict.fromkeys(record["provider"] for record in records))
    figure = Figure(figsize=(9.0, 2.2 + 0.24 * max(places.values())), layout="constrained")
    axes = figure.subplots()
    for provider in sorted(providers, key=lambda name: name == OURS):
        own = [each for each in records if each["provider"] == provider]
        _draw(axes, provider, {places[shape_of(each)]: each["gb_per_s"] for each in own})
    if result["copy_gb_per_s"] is not None:
        axes.axvline(result["copy_gb_per_s"], color="black", linestyle="--", linewidth=1, label="device copy")
    for place, name in groups.items():
        beside = {"xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(name, (0, place), va="center", style="italic", **beside)
    axes.set_yticks(list(places.values()), [f"{rows} x {cols}" for rows, cols in shapes])
    axes.set_ylim(max(places.values()) + 0.7, min([*places.values(), *groups]) - 0.7)
    axes.set_ylabel("rows x columns")
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s of compulsory bytes: further right is faster")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    ours_first = sorted(zip(handles, labels, strict=True), key=lambda pair: pair[1] != OURS)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.12, 1)}
    axes.legend(*zip(*ours_first, strict=True), ncols=4, frameon=False, fontsize=9, **place)
    pictures.describe(figure, f"RMSNorm {op}, {records[0]['dtype']}", result)
    pictures.save(figure, path)


def _draw(axes: Axes, provider: str, rates: dict[float, float]) -> None:
    color, marker, _ = style_of(provider)
    if provider == OURS:
        axes.barh(list(rates), list(rates.values()), 0.72, color=color, alpha=0.3)
    axes.scatter(
        list(rates.values()),
        list(rates),
        s=60 if provider == OURS else 30,
        color=color,
        marker=marker,
        # Light ones would be lost on the bar.
        **({} if marker in "x+" else {"edgecolors": "black", "linewidths": 0.4}),
        zorder=2 if provider == OURS else 3,  # the end of its bar shows it anyway
        label=provider,
    )


def _places(shapes: list[Shape]) -> tuple[dict[Shape, float], dict[float, str]]:
    """Place each shape's line, downwards, and the name of each group of shapes, if there are several."""
    places: dict[Shape, float] = {}
    names: dict[float, str] = {}
    at = 0.0
    for name, group in itertools.groupby(shapes, _group_of):
        names[at] = name
        at += GROUP_GAP
        for shape in group:
            places[shape] = at
            at += 1
        at += 0.2
    return places, names if len(names) > 1 else {}


def _group_of(shape: Shape) -> str:
    if shape in BATCHES:
        return "small calls"
    return "normalized heads (QK norm)" if shape[1] <= WIDEST_HEAD else "hidden sizes of models"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report.plots", description="Draws results again.")
    parser.add_argument("result", type=options.path, nargs="+", metavar="RESULT.json")
    for path in parser.parse_args(argv).result:
        written = plot_result(json.loads(path.read_text()), path.with_suffix(""))
        print("\n".join(map(str, written.values())))


if __name__ == "__main__":
    main()
