# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""FSDP2, tensor, sequence and context parallelism, pipelines and compiled blocks: in two or four processes on a CPU,
where cutile's kernels run in the interpreter, and on two GPUs. parallel_training.py says what is checked."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import why_skip
from processes import run_once

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("parallel_training.py")
BACKENDS = ("auto", "cutile")


def cases() -> list[str]:
    """The keys of CASES, by the source: to import it here would take its modules into this process."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES":
            return [ast.literal_eval(key) for key in node.value.keys]
    raise LookupError(f"no CASES in {SCRIPT}")


def start(factory: pytest.TempPathFactory, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """All cases of all backends that can run here, one after the other, in one process group."""
    names = [f"{case} {name}" for case in cases() for name in BACKENDS if not skipped(name)]
    return run_once(factory, *command, SCRIPT, *names, **more)


def skipped(backend: str) -> str | None:
    """Why no case runs on this backend here."""
    return None if backend == "auto" else why_skip(backend)


@pytest.fixture(scope="module")
def four_cpus(tmp_path_factory):
    on_cpus = {"CUDA_VISIBLE_DEVICES": "", "TILEGYM_RMSNORM_INTERPRET": "1"}
    return start(tmp_path_factory, **on_cpus, GLOO_SOCKET_IFNAME="lo")


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    return start(tmp_path_factory, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def check(case: str, backend: str, done: subprocess.CompletedProcess[str]) -> None:
    # Anywhere in a line: gloo writes to stdout as well, and not by lines.
    said = re.search(rf"(passed|skipped) {case} {backend}:.*", done.stdout)
    assert said, done.stdout + done.stderr[-6000:]
    if said[1] == "skipped":
        pytest.skip(said[0])


each_case = pytest.mark.parametrize("case", cases())
each_backend = pytest.mark.parametrize("name", BACKENDS)


@each_backend
@each_case
def test_four_processes(case, name, request):
    if reason := skipped(name):
        pytest.skip(reason)
    check(case, name, request.getfixturevalue("four_cpus"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_backend
@each_case
def test_two_gpus(case, name, request):
    if reason := skipped(name):
        pytest.skip(reason)
    check(case, name, request.getfixturevalue("two_gpus"))
