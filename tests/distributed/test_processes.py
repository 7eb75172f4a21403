# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Programs of several processes: training in parallel, in two or four processes on a CPU, where cutile's kernels run in
the interpreter, or on two GPUs; an SM margin beside all_reduce; and the program of docs/distributed.md."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import why_skip
from processes import run_once, run_script

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

BESIDE = Path(__file__).with_name("beside_communication.py")


def run(case: str, folder: Path, **more: str) -> None:
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    # The script ends by itself where it hangs.
    done = run_script(BESIDE, case, folder / "store", timeout=240, **more)
    assert done.returncode == 0 and done.stdout.count("passed") == 2, done.stdout + done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("case", ["walks", "walks with a residual", "teams"])
def test_on_two_gpus(case, tmp_path):
    run(case, tmp_path)


@pytest.mark.no_gpu
@pytest.mark.parametrize("case", ["walks with a residual", "teams"])
def test_the_same_without_a_gpu(case, tmp_path):
    """The test above does what it says, in the interpreter, where nothing runs at the same time."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    run(case, tmp_path, GLOO_SOCKET_IFNAME="lo")


ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "distributed.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_the_page_runs(tmp_path):
    assert len(BLOCKS) == 5
    program = tmp_path / "page.py"
    program.write_text("\n".join(BLOCKS) + f'\nopen("{tmp_path}/ran" + os.environ["RANK"], "w").close()\n')
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_script(*launcher, program, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0 and len(list(tmp_path.glob("ran?"))) == 2, done.stderr[-4000:]


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
