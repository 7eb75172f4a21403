# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Loss curves of bench.train: do they agree, and how to show them.

The measure is the largest distance between two smoothed curves (a moving average over `smoothed` steps). The noise is
that distance between the first way's two seeds; another way agrees if its distance from the first with the same seed
is no larger.
"""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from bench.measure.shapes import Result
from bench.report import pictures


def smooth(losses: list[float], window: int) -> list[float]:
    """The mean of each `window` consecutive losses."""
    sums = [0.0, *accumulate(losses)]
    return [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]


def distance(left: list[float], right: list[float], window: int) -> float:
    """The largest distance between two smoothed curves; NaN if either holds a loss that is not finite."""
    if not all(map(math.isfinite, left + right)):
        return math.nan
    pairs = zip(smooth(left, window), smooth(right, window), strict=True)
    return max(abs(a - b) for a, b in pairs)


def losses_of(result: Result) -> dict[str, list[float]]:
    """Return by name the losses of each way that has some."""
    return {each["norm"]: each["losses"] for each in result["trained"] if "losses" in each}


def noise_of(result: Result) -> float | None:
    """How far the first way's curves of two seeds are apart; None where it failed."""
    first = next((each for each in result["trained"] if "other_losses" in each), None)
    return first and distance(first["losses"], first["other_losses"], result["smoothed"])


def distances_of(result: Result) -> dict[str, float]:
    """Return by name how far each curve is from the first one."""
    found = losses_of(result)
    base = next(iter(found.values()), [])
    return {name: distance(losses, base, result["smoothed"]) for name, losses in found.items()}


def disagreeing(result: Result) -> list[str]:
    """One line for each way whose curve is not finite, or farther from the first one than its other seed's."""
    noise = noise_of(result)
    return [
        f"{name}: its loss curve is {far:.4f} from the first one; another seed's is {noise or math.nan:.4f} from it"
        for name, far in distances_of(result).items()
        if not far <= (math.inf if noise is None else noise)
    ]


def plot(result: Result, title: str, path: Path) -> None:
    """The smoothed curves, and below them how far each is from the first one."""
    window = result["smoothed"]
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    found = losses_of(result)
    base = smooth(next(iter(found.values())), window)
    curves = {name: smooth(losses, window) for name, losses in found.items()}
    for each in result["trained"]:
        if "other_losses" in each:
            curves[f"{each['norm']}, another seed"] = smooth(each["other_losses"], window)
    steps = range(window, window + len(base))
    for name, curve in curves.items():
        is_noise = name not in found
        style = {"color": "#888888" if is_noise else None, "linestyle": "--" if is_noise else "-"}
        above.plot(steps, curve, label=name, **style)
        below.plot(steps, [ours - theirs for ours, theirs in zip(curve, base, strict=True)], **style)
    above.set_ylabel(f"training loss, mean of {window} steps")
    above.legend(frameon=False)
    below.set_ylabel("minus the first")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    pictures.describe(figure, title, result)
    pictures.save(figure, path)
