# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The one picture of README.md: the backward at the hidden sizes of well-known models, ours beside its best peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from bench.measure.shapes import Result, Shape, kind_of, shape_of
from bench.providers.ours import BASELINES, COMPILED_MODES, OURS
from bench.report import pictures
from bench.report.styles import style_of

GPU, DTYPE, OP = "NVIDIA H100 80GB HBM3", "bfloat16", "backward"
# Shapes of the benchmark, and a model whose hidden size it is.
MODELS = {
    (16384, 2048): "Llama 3.2 1B",
    (16384, 3072): "Llama 3.2 3B",
    (16384, 4096): "Llama 3.1 8B",
    (16384, 5120): "Qwen3 32B",
    (8192, 7168): "DeepSeek V3",
    (8192, 8192): "Llama 3.1 70B",
    (4096, 16384): "Llama 3.1 405B",
}


class Series(NamedTuple):
    """One colour of bars: the fastest of some providers."""

    label: str
    provider: str  # whose colour it has
    has: Callable[[str], bool]


SERIES = (
    Series("this package", OURS, lambda name: name == OURS),
    Series("quack", "quack", lambda name: name == "quack"),
    Series("Liger, fastest of its kernels", "liger.triton", lambda name: name.startswith("liger.")),
    Series("torch.compile, faster of two modes", BASELINES[1], lambda name: name in COMPILED_MODES),
    Series("F.rms_norm", "F.rms_norm", lambda name: name == "F.rms_norm"),
)


def result_shown(results: Iterable[Result]) -> Result | None:
    """The last of the results that is of that GPU and dtype, over the shapes of models; None if there is none."""
    of_models = (each for each in results if each["gpu"] == GPU and kind_of(each) == "models")
    found = [each for each in of_models if each["records"][0]["dtype"] == DTYPE]
    return max(found, key=lambda each: each["date"], default=None)


def rates(result: Result, series: Series) -> list[float]:
    """The highest GB/s of a series at each of the models' shapes; NaN, which has no bar, where it was not measured."""
    cells: dict[Shape, list[float]] = {shape: [] for shape in MODELS}
    for record in result["records"]:
        shape = shape_of(record)
        is_shown = record["op"] == OP and shape in cells and record["gb_per_s"] is not None
        if is_shown and series.has(record["provider"]):
            cells[shape].append(record["gb_per_s"])
    return [max(rates, default=math.nan) for rates in cells.values()]


def plot(result: Result, path: Path) -> None:
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(SERIES)
    for number, series in enumerate(SERIES):
        heights = rates(result, series)
        places = [index + (number - (len(SERIES) - 1) / 2) * width for index in range(len(MODELS))]
        color = style_of(series.provider).color
        axes.bar(places, heights, width, color=color, edgecolor="white", linewidth=0.5, label=series.label)
    copy = result["copy_gb_per_s"]
    axes.axhline(copy, color="black", linestyle="--", linewidth=1)
    beside = {"xycoords": ("axes fraction", "data"), "xytext": (4, 3), "textcoords": "offset points"}
    axes.annotate("a plain copy of memory", (0, copy), **beside)
    labels = [f"{rows} x {cols}\n{name}" for (rows, cols), name in MODELS.items()]
    axes.set_xticks(range(len(MODELS)), labels, fontsize=9)
    axes.set_xlabel("rows x hidden size, and a model that has this size")
    axes.set_ylabel("GB/s: higher is faster")
    axes.set_ylim(0, 1.1 * copy)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    pictures.describe(figure, f"Backward of RMSNorm in {DTYPE}", result)
    pictures.save(figure, path)
