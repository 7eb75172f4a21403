# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Scripts that a test starts; cases that several processes run together, on a CPU with gloo between them, one after the
other until one fails; and a process group of one process."""

import contextlib
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
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


def run_cases(script: dict[str, Any], *, compiles: bool = False) -> None:
    """Run a script's functions of `mesh` alone, in their order, with a mesh of all processes, which are forked, so that
    torch is imported once, and with `compiles` also what it compiles with. No backward runs here, or PyTorch would
    refuse those of forked processes. script: its globals."""
    functions = filter(inspect.isfunction, script.values())
    cases = tuple(each for each in functions if [*inspect.signature(each).parameters] == ["mesh"])
    if compiles:
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True))
    with tempfile.TemporaryDirectory() as folder:
        given = os.path.join(folder, "store"), cases
        torch.multiprocessing.start_processes(_each, given, nprocs=PROCESSES, start_method="fork")


def run_script(*command: str | Path, timeout: float = 400, **more: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, which imports this package and tests/support. more: of the environment."""
    folders = [str(TESTS / "support"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", **more}
    given = [sys.executable, *command]
    return subprocess.run(given, capture_output=True, text=True, env=environment, timeout=timeout)


def run_once(
    factory: pytest.TempPathFactory, *command: str | Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """`run_script`, once in a run of the tests: of the processes of pytest-xdist, which share the tests of a file, one
    runs it, and the others wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return run_script(*command, **more)
    import fcntl  # not on Windows

    name = hashlib.sha256(repr((command, sorted(more.items()))).encode()).hexdigest()[:16]
    result = factory.getbasetemp().parent / f"once-{name}.json"
    with open(result.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            done = run_script(*command, **more)
            result.write_text(
                json.dumps([list(map(str, command)), done.returncode, done.stdout, done.stderr])
            )
        return subprocess.CompletedProcess(*json.loads(result.read_text()))


def placed(tensors: Iterable[Any], mesh: Any, places: Iterable[Any]) -> list[Any]:
    """Each as a DTensor that needs a gradient where the tensor does. places: of each one placement, or several."""
    from torch.distributed.tensor import distribute_tensor

    several = (place if isinstance(place, list) else [place] for place in places)
    return [
        t if t is None else distribute_tensor(t.detach(), mesh, at).requires_grad_(t.requires_grad)
        for t, at in zip(tensors, several, strict=True)
    ]


@contextlib.contextmanager
def mesh_of_one() -> Iterator[Any]:
    """A process group of this process alone, on its CPU: the mesh of it. Skips where there can be none."""
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs a process group of its own")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
