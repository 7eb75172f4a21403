# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torchtitan's own Trainer on CPUs, with its norms and with ours: what test_torchtitan.py starts.

python tests/distributed/torchtitan_training.py RUN... CASE...

Prints a line of JSON for each override of each run: its losses, those without overrides, and how far gradients are
apart. Then it runs cases of torchtitan_cases.py.
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from typing import Any

import torch

OVERRIDES = "rms_norm", "layers"
Run = tuple[int, str, dict[str, Any]]  # processes, model, options of config_of
FP32, TP = {"dtype": "float32"}, {"tp": 2}
RUNS: dict[str, Run] = {
    "one process, float32": (1, "qwen3", FP32),
    "one process, compiled": (1, "qwen3", {"compiled": True, "n_layers": 1}),
    "FSDP2, recomputed": (2, "qwen3", {"recompute": True}),
    "TP and SP, float32": (2, "qwen3", {**TP, **FP32}),
    "TP without SP, float32": (2, "llama3", {**TP, **FP32, "sp": False}),
    "TP and SP, full_dtensor, float32": (2, "llama3", {**TP, **FP32, "spmd": "full_dtensor"}),
}
# With PyTorch 2.14 and later: before, torchtitan's default fails in more than one process, with any norm.
SPMD_RUNS: dict[str, Run] = {
    f"spmd_types, {model}, {name}, {kind}": (2, model, {**options, **more, "spmd": "spmd_types"})
    for model in ("llama3", "qwen3")
    for name, options in {"FSDP2": {}, "TP and SP": TP, "TP without SP": {**TP, "sp": False}}.items()
    for kind, more in {
        "float32": FP32,
        "checked": {"checks_types": True},
        "compiled": {"compiled": True},
    }.items()
}


def train(rank: int, name: str, overrides: list[str], port: int, path: str) -> None:
    import titan_on_cpu

    world, model, options = (RUNS | SPMD_RUNS)[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    trained = titan_on_cpu.train(titan_on_cpu.config_of(model, overrides, **options))
    if rank == 0:
        torch.save(tuple(trained), path)


def in_processes(name: str, overrides: list[str]) -> Any:
    """Train in processes of their own: DTensor keeps meshes of a process group that has ended, and takes them for those
    of the next. They are forked, so that torchtitan is imported once."""
    import titan_on_cpu

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        path = os.path.join(folder, "trained")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        given, world = (name, overrides, port, path), (RUNS | SPMD_RUNS)[name][0]
        torch.multiprocessing.start_processes(train, given, nprocs=world, start_method="fork")
        return titan_on_cpu.Trained(*torch.load(path, weights_only=False))


def report(name: str, override: str, theirs: Any, ours: Any) -> dict[str, Any]:
    apart = {key: float((ours.grads[key] - grad).norm() / grad.norm()) for key, grad in theirs.grads.items()}
    states = [
        {key: (value.dtype, value.shape) for key, value in each.state.items()} for each in (theirs, ours)
    ]
    return {
        "run": name,
        "override": override,
        "losses": [theirs.losses, ours.losses],
        "apart": max((value, key) for key, value in apart.items()),
        "same state dict": list(states[0].items()) == list(states[1].items()),
        "classes": ours.classes,
    }


def main(names: list[str]) -> None:
    import titan_on_cpu

    if any("compiled" in name for name in names):
        torch.compile(torch.sin)(torch.ones(1))  # before processes are forked, with all that it imports
    for name in RUNS | SPMD_RUNS:
        if name not in names:
            continue
        theirs = in_processes(name, [])
        for override in OVERRIDES:
            ours = in_processes(name, [f"{titan_on_cpu.OURS}.{override}"])
            print("\n" + json.dumps(report(name, override, theirs, ours)), flush=True)
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
