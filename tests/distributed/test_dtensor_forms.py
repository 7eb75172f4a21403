# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Residual, bias, heads and dtypes of DTensors and under FSDP2, in two processes without a GPU."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("two_cpus.py")
TESTS = SCRIPT.parents[1]
CASES = (
    "each_variant",
    "residual_placed_otherwise",
    "sum_still_to_be_made",
    "plain_beside_distributed",
    "below_autograd",
    "module_in_sequence_parallel",
    "result_of_a_collective",
    "fully_sharded",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All cases, one after the other until one fails."""
    folders = [str(TESTS / "support"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, SCRIPT, tmp_path_factory.mktemp("two") / "store"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, done):
    assert f"passed {case}" in done.stdout.splitlines(), done.stderr[-4000:]


def test_each_case_runs():
    tree = ast.parse(SCRIPT.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    of_mesh = [f.name for f in functions if [argument.arg for argument in f.args.args] == ["mesh"]]
    assert sorted(of_mesh) == sorted(CASES)
