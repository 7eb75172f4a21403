# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Loss curves of train.py: do they agree, and how to show them.

The measure is the largest distance between two smoothed curves (a moving average over `smoothed` steps). The noise is
that distance between the baseline's two seeds; a backend agrees if its distance from the baseline with the same seed is
no larger.
"""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.measure.provenance import one_line
from bench.measure.shapes import Result
from bench.report import pictures
from bench.report.styles import style_of
from bench.report.text import figure_text, table_text

Run = dict[str, Any]
TABLE_ROWS = 12  # of the loss table: every 25 steps of 300


def smooth(losses: list[float], window: int) -> list[float]:
    """The mean of each `window` consecutive losses."""
    sums = [0.0, *accumulate(losses)]
    return [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]


def distance(left: Run, right: Run, window: int) -> float:
    """The largest distance between two smoothed curves; NaN if either holds a loss that is not finite."""
    if not all(map(math.isfinite, left["losses"] + right["losses"])):
        return math.nan
    pairs = zip(smooth(left["losses"], window), smooth(right["losses"], window), strict=True)
    return max(abs(a - b) for a, b in pairs)


def compare(runs: list[Run], window: int) -> Result:
    """`noise`, and by name each backend's `distances` from the baseline and whether it `agrees`. The first two runs
    are the baseline's."""
    baseline, other_seed, *backends = runs
    noise = distance(baseline, other_seed, window)
    distances = {run["name"]: distance(run, baseline, window) for run in backends}
    return {
        "noise": noise,
        "distances": distances,
        "agrees": {name: far <= noise for name, far in distances.items()},
    }


def label(run: Run, result: Result) -> str:
    seeds = {each["seed"] for each in result["runs"] if each["name"] == run["name"]}
    return f"{run['name']}, seed {run['seed']}" if len(seeds) > 1 else run["name"]


def loss_table(result: Result, style: str = "simple") -> str:
    """The smoothed loss of each run, about every 25 steps."""
    window, steps = result["setup"]["smoothed"], result["setup"]["steps"]
    curves = [smooth(run["losses"], window) for run in result["runs"]]
    stride = max(1, steps // TABLE_ROWS)
    ends = [end for end in range(stride, steps + 1, stride) if end >= window]
    rows = [[end, *(f"{curve[end - window]:.4f}" for curve in curves)] for end in ends]
    headers = ["step", *(label(run, result) for run in result["runs"])]
    return table_text(rows, headers, style, left=())


def summary_table(result: Result, style: str = "simple") -> str:
    """Speed, memory and where each run ended."""
    window = result["setup"]["smoothed"]
    rows = []
    for run in result["runs"]:
        peak = "" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.2f}"
        far = result["distances"].get(run["name"])
        losses = smooth(run["losses"], window)[-1], run["validation_loss"], far
        row = [label(run, result), f"{run['tokens_per_s']:,.0f}", peak]
        rows.append(row + [figure_text(loss, ".4f") for loss in losses])
    headers = ["norm", "tokens/s", "peak GiB", "training loss", "validation loss", "distance from baseline"]
    return table_text(rows, headers, style)


def verdict(result: Result) -> str:
    """Say how far each curve is from the baseline's, and how far that is from its other seed's."""
    lines = [
        f"{name} {'agrees' if result['agrees'][name] else 'DOES NOT AGREE'} with the baseline: its curve, smoothed "
        f"over {result['setup']['smoothed']} steps, is at most {far:.4f} away; the baseline's other seed is up to "
        f"{result['noise']:.4f} away."
        for name, far in result["distances"].items()
    ]
    reached = sorted({each for run in result["runs"] for each in run["norm_inputs"]})
    return "\n".join([*lines, f"What reached the last norm: {'; '.join(reached)}."])


def readme_section(result: Result, image: str) -> str:
    """The result as Markdown."""
    setup, parameters = result["setup"], result["runs"][0]["parameters"]
    model = f"Llama of {parameters / 1e6:.0f}M parameters, {setup['steps']} steps of {setup['batch']} x "
    model += f"{setup['length']} bytes of the Python standard library."
    note = [f"**{result['note']}**"] if result["note"] else []
    intro = " ".join([model, *note, f"{one_line(result)}."])
    return f"{intro}\n\n{summary_table(result, 'pipe')}\n\n{verdict(result)}\n\n![Loss over steps]({image})"


def plot(result: Result, path: Path) -> None:
    """The smoothed curves, and below them how far each is from the baseline with the same seed."""
    window = result["setup"]["smoothed"]
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    baseline = smooth(result["runs"][0]["losses"], window)
    steps = range(window, result["setup"]["steps"] + 1)
    for index, run in enumerate(result["runs"]):
        style = {"color": style_of(run["name"]).color, "linestyle": "--" if index == 1 else "-"}
        style["label"] = label(run, result)
        curve = smooth(run["losses"], window)
        above.plot(steps, curve, **style)
        if index > 0:
            below.plot(steps, [ours - theirs for ours, theirs in zip(curve, baseline, strict=True)], **style)
    above.set_ylabel(f"training loss, mean of {window} steps")
    above.legend(frameon=False)
    below.set_ylabel("minus baseline")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    pictures.describe(figure, "Training a small Llama with each RMSNorm", result)
    pictures.save(figure, path)
