# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Cases that several processes run together, on a CPU with gloo between them: how a script runs its cases, one after
the other until one fails, and how a test starts the script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

TESTS = Path(__file__).parents[1]
PROCESSES = 4
# Before, PyTorch refuses to flatten dimensions of which one that is not the first is sharded.
CAN_FLATTEN = TorchVersion(torch.__version__) >= "2.13"


def _each(rank: int, path: str, cases: tuple[Callable[[Any], None], ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(path, PROCESSES), rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for case in cases:
        begin = time.perf_counter()
        case(mesh)
        dist.barrier()
        if rank == 0:
            print("passed", case.__name__, f"{time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


def run(*cases: Callable[[Any], None]) -> None:
    """What a script does that is started with a path for the store: its cases, given a mesh of all processes. Forked,
    so that torch is imported once."""
    torch.multiprocessing.start_processes(_each, (sys.argv[1], cases), nprocs=PROCESSES, start_method="fork")


def start(script: Path, store: Path) -> subprocess.CompletedProcess[str]:
    folders = [str(TESTS / "support"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, script, store]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
