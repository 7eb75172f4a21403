# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan's own Trainer on CPUs, with its norms and with ours: what test_torchtitan.py starts.

python tests/distributed/torchtitan_training.py RUN... CASE...

Prints a line of JSON for each override of each run: its losses, those without overrides, and how far gradients are
apart. Then it runs cases of torchtitan_cases.py.
"""

import functools
import json
import os
import sys
import traceback
from typing import Any

import torch

OVERRIDES = "rms_norm", "layers"
GRAPHS = "graph trainer"
PIPELINES = "tilegym_rmsnorm_replace", "tilegym_rmsnorm_regional"
Run = tuple[int, str, dict[str, Any]]  # processes, model, options of config_of
FP32, TP = {"dtype": "float32"}, {"tp": 2}
RUNS: dict[str, Run] = {
    "one process, experts, float32": (1, "deepseek_v3", FP32),
    "one process, compiled": (1, "qwen3", {"compiled": True, "n_layers": 1}),
    "FSDP2, recomputed": (2, "qwen3", {"recompute": True}),
    "TP and SP, float32": (2, "qwen3", {**TP, **FP32}),
    "TP and SP, full_dtensor, float32": (2, "llama3", {**TP, **FP32, "spmd": "full_dtensor"}),
}
# With PyTorch 2.14 and later: before, torchtitan's default fails in more than one process, with any norm.
SPMD_RUNS: dict[str, Run] = {
    f"spmd_types, {name}": (2, model, {**options, "spmd": "spmd_types"})
    for name, (model, options) in {
        "llama3, FSDP2, compiled": ("llama3", {"compiled": True}),
        "llama3, TP and SP, checked": ("llama3", {**TP, "checks_types": True}),
        "llama3, TP without SP, checked": ("llama3", {**TP, "sp": False, "checks_types": True}),
        "qwen3, FSDP2, float32": ("qwen3", FP32),
        "qwen3, FSDP2, checked": ("qwen3", {"checks_types": True}),
        "qwen3, TP and SP, float32": ("qwen3", {**TP, **FP32}),
        "qwen3, TP and SP, checked": ("qwen3", {**TP, "checks_types": True}),
        "qwen3, TP and SP, compiled": ("qwen3", {**TP, "compiled": True}),
        "qwen3, TP without SP, float32": ("qwen3", {**TP, **FP32, "sp": False}),
    }.items()
}


def train(name: str, overrides: list[str]) -> Any:
    import titan_on_cpu

    model, options = (RUNS | SPMD_RUNS)[name][1:]
    return titan_on_cpu.train(titan_on_cpu.config_of(model, overrides, **options))


def train_graphs(pipeline: str, overrides: list[str]) -> Any:
    """On a GPU norms are traced as aten's fused ops; here they are where these are overridden. Trained.classes: how
    many nodes the passes found."""
    import titan_on_cpu

    from tilegym_rmsnorm import use_backend
    from tilegym_rmsnorm.integrations import fx, override_aten, torchtitan_graphs  # noqa: F401  it registers

    options = {"dtype": "float32", "n_layers": 1, "pipeline": pipeline}
    if pipeline == "default":
        return titan_on_cpu.train(titan_on_cpu.config_of("llama3", overrides, **options))
    os.environ["TILEGYM_RMSNORM_INTERPRET"] = "1"
    found = {}

    def watch(name):
        before = getattr(fx, name)

        @functools.wraps(before)
        def watched(gm, example_inputs=None):
            gm = before(gm, example_inputs)
            marks = ("compile_with_inductor" in node.meta.get("custom", {}) for node in gm.graph.nodes)
            found[name] = gm.meta.get(fx.REPLACED, sum(marks))
            return gm

        setattr(fx, name, watched)

    watch("replace_rmsnorm_pass")
    watch("annotate_rmsnorm_for_regional_inductor_pass")
    with override_aten("cpu"), use_backend("cutile"):
        return titan_on_cpu.train(titan_on_cpu.config_of("llama3", [], **options))._replace(classes=found)


def main(names: list[str]) -> None:
    import titan_on_cpu
    from titan_imports import in_processes, report

    if any("compiled" in name for name in names):
        torch.compile(torch.sin)(torch.ones(1))  # before processes are forked, with all that it imports
    for name in RUNS | SPMD_RUNS:
        if name not in names:
            continue
        world = (RUNS | SPMD_RUNS)[name][0]
        theirs = in_processes(world, train, name, [])
        for override in OVERRIDES:
            ours = in_processes(world, train, name, [f"{titan_on_cpu.OURS}.{override}"])
            print("\n" + json.dumps(report(name, override, theirs, ours)), flush=True)
    if GRAPHS in names:
        theirs = in_processes(1, train_graphs, "default", [])
        for each in (*PIPELINES, *OVERRIDES):
            given = (each, []) if each in PIPELINES else ("default", [f"{titan_on_cpu.OURS}.{each}"])
            ours = in_processes(1, train_graphs, *given)
            print("\n" + json.dumps(report(GRAPHS, each, theirs, ours)), flush=True)
    import torchtitan_cases  # last: a process that ran a backward may not be forked

    for name in names:
        if case := vars(torchtitan_cases).get(name):
            try:
                case()
                print(f"\npassed {name} ", flush=True)
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUNS))
