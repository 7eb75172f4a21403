# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""DTensors and FSDP2 in four processes on a CPU, with gloo between them."""

import ast
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import processes  # noqa: E402

FOLDER = Path(__file__).parent


def cases_of(script: str) -> list[str]:
    """The functions of a mesh, by its source: to import it here would take its modules into this process."""
    tree = ast.parse((FOLDER / script).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [argument.arg for argument in f.args.args] == ["mesh"]]


SCRIPTS = sorted(path.name for path in FOLDER.glob("*_of_dtensors.py"))
CASES = [(script, case) for script in SCRIPTS for case in cases_of(script)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the output of a script, run when a case of it is first asked for."""
    results = {}

    def run(script):
        if script not in results:
            on_cpus = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
            results[script] = processes.run_once(tmp_path_factory, FOLDER / script, **on_cpus)
        return results[script]

    return run


@pytest.mark.parametrize(("script", "case"), CASES)
def test_four_processes(script, case, done):
    result = done(script)
    # Anywhere in a line: gloo writes to stdout as well, and not by lines.
    assert f"passed {case} " in result.stdout, result.stderr[-4000:]
