# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of bench.train as tables.

With one_rank a result is of rank 0 of fsdp x tp alone (bench/train/one_rank.py).

A result is the provenance of provenance.py, note, model, compiled, is_tiny, fsdp, tp, one_rank, sm_margin, sizes,
norms_in_model, flops_per_token, steps and smoothed of the loss curves, corpus_bytes, and `trained`. Each of those is

norm                            the way to compute the norms; others are compared with the first
step_s                          seconds of a step, turn by turn: the i-th of all ways were taken one after the other
first_step_s                    seconds of the first step, with what it compiles
graphs, graph_breaks            what Dynamo counted in the first steps, of compiled models
peak_bytes                      most memory allocated in a step
device_ms                       milliseconds of forward and backward by kind of kernel, see bench/train/kernels.py
exposed_ms                      of these, communication while nothing else ran
optimizer_ms                    milliseconds of the optimizer
norm_kernels                    how often each of this package's kernels ran in one forward and backward
kernels                         the longest: name, kind, count, milliseconds
losses, other_losses            of training from one seed, and from another
validation_loss                 afterwards, of text that was not trained on
same_bits                       whether two deterministic runs have the same losses and parameters
why_no_bits                     why that is None, where an operation has no deterministic kernel
error                           why there are no figures, None where there are
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.measure.provenance import PACKAGE, one_line
from bench.measure.shapes import Result
from bench.report import curves
from bench.report.tables import folded
from bench.report.text import figure_text, table_text
from bench.train.kernels import APART, OURS
from bench.train.models import MODELS
from bench.train.ratios import Ratio, ratio_of

IN_GRAPHS = (
    "override_aten",
    "traced",
    "regional",
    "replaced",
)  # ways that README.md leaves to docs/training.md
# Operations per second of matrices in bfloat16, by what a GPU's name contains: without sparsity, from its data sheet.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}


def stem_of(result: Result) -> str:
    """Name a result's file: train-MODEL-MODE, with how many GPUs and what margin."""
    mode = "compiled" if result["compiled"] else "eager"
    parts = ["train", result["model"], mode, *degrees(result)]
    return "-".join([*parts, *([f"margin{result['sm_margin']}"] if result["sm_margin"] else [])])


def degrees(result: Result) -> list[str]:
    """Say in the name of a file over how many ranks a result is."""
    found = [f"{name}{result[name]}" for name in ("fsdp", "tp") if result[name] > 1]
    return [*found, *(["one-rank"] if result.get("one_rank") else [])]


def read(folder: Path) -> list[Result]:
    """Read the results that a folder holds."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("train-*.json"))]


def failures(result: Result) -> list[str]:
    """One line for each way without figures, and for each loss curve that does not agree."""
    failed = [f"{each['norm']}: {each['error']}" for each in result["trained"] if each["error"]]
    return failed + curves.disagreeing(result)


def ratios(result: Result) -> dict[str, Ratio]:
    """Return by name the time of the first way over each way's."""
    timed = {each["norm"]: each["step_s"] for each in result["trained"] if each.get("step_s")}
    base = next(iter(timed.values()), [])
    return {name: ratio_of(base, seconds) for name, seconds in timed.items()}


def data_ranks(result: Result) -> int:
    """Count the ranks whose batches count: of one rank alone its own."""
    return 1 if result.get("one_rank") else result["fsdp"]


def tokens_per_s(result: Result, one: dict[str, Any]) -> float:
    """Tokens of all ranks in a second of the median step; of one rank alone those of its own batch."""
    sizes = result["sizes"]
    return data_ranks(result) * sizes["batch"] * sizes["length"] / statistics.median(one["step_s"])


def mfu(result: Result, one: dict[str, Any]) -> float | None:
    """Return the share of the GPUs' peak rate that the model's own operations reach; None for GPUs not in PEAKS."""
    peak = next((rate for name, rate in PEAKS.items() if name in (result["gpu"] or "")), None)
    if peak is None:
        return None
    return tokens_per_s(result, one) * result["flops_per_token"] / (peak * data_ranks(result) * result["tp"])


def rest_ms(one: dict[str, Any]) -> float | None:
    """Sum device milliseconds of all but matrices, attention and communication."""
    device = one.get("device_ms")
    return device and sum(ms for kind, ms in device.items() if kind not in APART)


def title(result: Result) -> str:
    text = f"{result['model']}, {'compiled' if result['compiled'] else 'eager'}"
    more = [f"{name} {result[key]}" for key, name in (("fsdp", "FSDP2"), ("tp", "TP")) if result[key] > 1]
    more[:1] = [f"rank 0 of {each}" if result.get("one_rank") else each for each in more[:1]]
    more += [f"SM margin {result['sm_margin']}"] if result["sm_margin"] else []
    return ", ".join([text, *more])


def notes(result: Result) -> list[str]:
    """Say what the figures must not be taken for."""
    found, ranks = [], result["fsdp"] * result["tp"]
    if result.get("one_rank"):
        found = [f"One GPU as rank 0 of {ranks}, with PyTorch's fake process group: nothing is communicated."]
        found += [f"Its tokens/s are those of its tensor-parallel group, and not those of {ranks} GPUs."]
    return [*found, *filter(None, [result["note"]])]


def ratio_text(ratio: Ratio) -> str:
    """'1.171 (1.168 to 1.175)', or '1' of the first way itself."""
    if ratio.low == ratio.high == 1.0:
        return "1"
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def distances(result: Result) -> dict[str, float]:
    """Return by name how far each loss curve is from the first one; none of one rank alone: its losses mean nothing."""
    return {} if result.get("one_rank") else curves.distances_of(result)


def speed_table(result: Result) -> str:
    """A line for each way: what a user feels."""
    found, far = ratios(result), distances(result)
    rows = []
    for each in result["trained"]:
        if each["norm"] not in found:
            continue
        name = each["norm"]
        row = [name, f"{tokens_per_s(result, each):,.0f}", ratio_text(found[name])]
        row += [figure_text(mfu(result, each), ".1%"), gibibytes(each.get("peak_bytes"))]
        row += [figure_text(far.get(name), ".4f"), figure_text(each.get("validation_loss"), ".4f")]
        row += [{True: "yes", False: "no", None: ""}[each.get("same_bits")]]
        rows.append([*row, f"{each['graphs']} ({each['graph_breaks']})" if "graphs" in each else ""])
    headers = [
        "norms",
        "tokens/s",
        "ratio, 95 % interval",
        "MFU",
        "peak GiB",
        "loss: distance",
        "validation loss",
    ]
    headers += ["same bits twice", "graphs (breaks)"]
    return table_text(rows, headers)


def device_table(result: Result) -> str:
    """A line for each way: milliseconds of forward and backward on the device, by kind of kernel."""
    kinds = list(dict.fromkeys(kind for each in result["trained"] for kind in each.get("device_ms", {})))
    rows = []
    base = None
    for each in result["trained"]:
        if "device_ms" not in each:
            continue
        rest = rest_ms(each) or 0.0
        base = base or rest
        row = [each["norm"], *(figure_text(each["device_ms"].get(kind), ".2f") for kind in kinds)]
        row += [f"{rest:.2f}", f"{rest / base - 1:+.1%}", figure_text(each.get("exposed_ms"), ".2f")]
        ran = ", ".join(f"{name} {count:g}" for name, count in each["norm_kernels"].items())
        # On several devices ranks wait for each other in it.
        optimizer = each.get("optimizer_ms") if result["fsdp"] * result["tp"] == 1 else None
        rows.append([*row, figure_text(optimizer, ".2f"), ran])
    headers = ["norms, ms", *kinds, "rest", "rest beside the first's", "exposed communication"]
    return table_text(rows, [*headers, "optimizer", f"{OURS}, by kernel"], left=(0, len(headers) + 1))


def gibibytes(count: int | None) -> str:
    return figure_text(None if count is None else count / 2**30, ".2f")


def section(result: Result) -> str:
    """The result as Markdown."""
    sizes = result["sizes"]
    text = f"**{title(result)}.** {sizes['layers']} layers of width {sizes['width']}, "
    text += f"{result['norms_in_model']} norms; {sizes['batch']} x {sizes['length']} tokens a step"
    text += " for each data-parallel process." if result["fsdp"] * result["tp"] > 1 else "."
    if (noise := curves.noise_of(result)) is not None:
        text += f" Losses of {result['steps']} steps; those of another seed are up to {noise:.2f} away."
    parts = [text, speed_table(result), device_table(result)]
    parts += [f"{line}." for line in failures(result)]
    parts += [f"**{' '.join(notes(result))}**"] if notes(result) else []
    return "\n\n".join([*filter(None, parts), f"{one_line(result)}."])


# Names of README.md, where nothing explains those of the command.
MODELS_SAID = {
    "llama-1b": "Llama-3.2-1B, Hugging Face",
    "qwen3-1.7b": "Qwen3-1.7B, Hugging Face",
    "decoder-4096": "own decoder, width 4096",
    "decoder-2048-qk": "own decoder, width 2048, QK-norm",
}
WAYS_SAID = {
    "original": "as the model has them",
    "F.rms_norm": "`torch.nn.RMSNorm`",
    "norms": "`patch_model(model)`",
    "layers": "`patch_model(model, patch_layers=True)`",
    "liger": "Liger's patch of the norms",
    "rms_norm": "`RMSNorm`",
    "residual": "`RMSNorm` with `residual=`",
    "fused": "the same, and `qk_norm_rope`",
}


def table(results: list[Result], is_brief: bool = False) -> str:
    """A line for each model and way: tokens/s of both modes, as ratios to the first way of that mode. is_brief: without
    the ways in IN_GRAPHS, without times of the device and memory, and by other names."""
    cells: dict[tuple[str, str], dict[bool, list[str]]] = {}
    figures = ["tokens/s", "ratio"] if is_brief else ["tokens/s", "ratio", "rest, ms", "peak GiB"]
    for result in results:
        name, found = title({**result, "compiled": False}).replace(", eager", ""), ratios(result)
        for each in result["trained"]:
            if each["norm"] in found and not (is_brief and each["norm"] in IN_GRAPHS):
                row = [f"{tokens_per_s(result, each):,.0f}", ratio_text(found[each["norm"]])]
                row += [figure_text(rest_ms(each), ".1f"), gibibytes(each.get("peak_bytes"))]
                key = name, each["norm"]
                if is_brief:
                    key = MODELS_SAID.get(name, name), WAYS_SAID[each["norm"]]
                cells.setdefault(key, {})[result["compiled"]] = row[: len(figures)]
    empty = [""] * len(figures)
    rows = [[*key, *of.get(False, empty), *of.get(True, empty)] for key, of in cells.items()]
    headers = [f"{mode}: {what}" for mode in ("eager", "compiled") for what in figures]
    return table_text(rows, ["model", "norms", *headers], left=(0, 1))


def in_order(results: Iterable[Result]) -> list[Result]:
    """Sort results by GPU, then those of one device, by model."""
    models = list(MODELS)
    return sorted(
        results,
        key=lambda each: (
            each["gpu"],
            each.get("one_rank", False),
            each["fsdp"] * each["tp"],
            models.index(each["model"]),
            each["compiled"],
            each["fsdp"],
            each["sm_margin"] or 0,
        ),
    )


def measured_with(results: list[Result]) -> str:
    """Say on what and with what these results were measured."""
    lines = {one_line(each).partition(f", {PACKAGE}")[0] for each in results}
    commits = dict.fromkeys(each["commit"][:12] for each in results)
    days = dict.fromkeys(each["date"][:10] for each in results)
    return f"{'; '.join(sorted(lines))}, at commit {', '.join(commits)}, {', '.join(days)}."


def readme_section(results: list[Result]) -> str:
    """The table of README.md: of one device, without the ways that docs/training.md has more."""
    shown = [each for each in in_order(results) if each["fsdp"] * each["tp"] == 1]
    if not shown:
        return ""
    return f"{table(shown, is_brief=True)}\n\n{measured_with(shown)}"


def page_section(results: list[Result], link: Callable[[str], str | None]) -> str:
    """The section of docs/training.md. link: to the picture of a result's losses, by its stem."""
    parts = []
    of_gpus: dict[tuple[str, str], list[Result]] = {}
    for each in in_order(results):
        count = "several" if each["fsdp"] * each["tp"] > 1 else "one"
        count = "one, as rank 0 of several" if each.get("one_rank") else count
        of_gpus.setdefault((each["gpu"], count), []).append(each)
    for (gpu, count), found in of_gpus.items():
        parts += [f"**{gpu}, {count}**", table(found), measured_with(found)]
        for each in found:
            image = link(stem_of(each))
            parts += folded(
                title(each), [section(each), *([f"![Loss over steps]({image})"] if image else [])]
            )
    return "\n\n".join(parts)
