# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Heat maps of a result over rows and columns: cutile against the best peer, and its share of the copy ceiling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.measure.shapes import Result, Shape, shape_of
from bench.report import pictures
from bench.report.compare import compare, mean_ratio, of_op, peers_of

RATIOS = (0.5, 1.0, 2.0)  # the ends and the middle of the colours; ratios beyond take the colour of the end


def plot_heatmaps(result: Result, op: str, path: Path) -> None:
    """Two maps side by side as PATH: ratio of the best peer's time to cutile's, and cutile's share of the copy rate."""
    comparisons = compare(result, op)
    ratios = {shape_of(each.ours): each.ratio for each in comparisons}
    timed = [each for each in of_op(result, op) if each["copy_fraction"] is not None]
    shares = {shape_of(each): each["copy_fraction"] for each in timed}
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    norm = TwoSlopeNorm(*(math.log2(ratio) for ratio in (RATIOS[1], RATIOS[0], RATIOS[2])))
    logs = {shape: math.log2(ratio) for shape, ratio in ratios.items()}
    _draw(left, logs, {shape: f"{ratio:.2f}" for shape, ratio in ratios.items()}, cmap="RdBu", norm=norm)
    mean = mean_ratio(comparisons)
    title = "" if mean is None else f", geometric mean {mean:.2f}"
    left.set_title(f"time of the best peer / time of cutile{title}")
    labels = {shape: f"{share:.0%}" for shape, share in shares.items()}
    _draw(right, shares, labels, cmap="Greens", vmin=0, vmax=1)
    right.set_title("share of the device copy's rate")
    dtype = result["records"][0]["dtype"]
    peers = f"against {', '.join(peers_of(result, op))}"
    pictures.describe(figure, f"RMSNorm {op}, {dtype}", result, peers)
    pictures.save(figure, path)


def _draw(axes: Axes, values: dict[Shape, float], labels: dict[Shape, str], **colours: Any) -> None:
    """One map: rows to the right, columns upwards, the label in every cell that has a value."""
    all_rows, all_cols = (sorted({shape[axis] for shape in values}) for axis in (0, 1))
    grid = [[values.get((rows, cols), math.nan) for rows in all_rows] for cols in all_cols]
    if not values:
        return
    image = axes.imshow(grid, origin="lower", aspect="auto", **colours)
    for (rows, cols), label in labels.items():
        at = all_rows.index(rows), all_cols.index(cols)
        dark = sum(image.cmap(image.norm(values[rows, cols]))[:3]) < 1.5
        axes.text(*at, label, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(all_rows)), all_rows, rotation=45)
    axes.set_yticks(range(len(all_cols)), all_cols)
    axes.set_xlabel("rows (M)")
    axes.set_ylabel("columns (N)")
