# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The picture of docs/training.md: the device's time of a step by kind of kernel, of each model and way."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.measure.shapes import Result
from bench.report import pictures
from bench.report.training import IN_GRAPHS, title
from bench.train.kernels import KINDS, OURS

COLUMNS = 4
GREYS = {"matmul": "#B8B8B8", "attention": "#DADADA"}  # no norm changes these
COLORS = {
    OURS: "#D55E00",
    "other norms": "#000000",
    "Inductor": "#CC79A7",
    "copies": "#56B4E9",
    "other": "#0072B2",
}


def plot(results: list[Result], path: Path) -> None:
    """results: of one GPU each, all of one GPU model; at least one."""
    rows = -(-len(results) // COLUMNS)
    figure = Figure(figsize=(12, 0.6 + 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axes, result in zip(panels, results, strict=False):
        draw(axes, result)
    for axes in list(panels)[len(results) :]:
        axes.axis("off")
    handles, labels = {}, {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label], labels[label] = handle, label
    shown = [kind for kind in KINDS if kind in labels]
    figure.legend([handles[kind] for kind in shown], shown, loc="outside right upper", frameon=False)
    newest = max(results, key=lambda each: each["date"])
    pictures.describe(figure, "Device time of forward and backward, by kind of kernel", newest)
    pictures.save(figure, path)


def draw(axes: Axes, result: Result) -> None:
    """Stack the milliseconds of each way."""
    ways = [each for each in result["trained"] if "device_ms" in each and each["norm"] not in IN_GRAPHS]
    names = [each["norm"] for each in ways]
    bottoms = [0.0] * len(ways)
    for kind in KINDS:
        heights = [each["device_ms"].get(kind, 0.0) for each in ways]
        if any(heights):
            color = {**GREYS, **COLORS}.get(kind)
            axes.bar(names, heights, 0.8, bottoms, color=color, label=kind, edgecolor="white", linewidth=0.4)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_title(title(result), fontsize=9)
    axes.set_ylabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", rotation=35)
