# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""An SM margin beside all_reduce: backwards end, are right, and have the bits that they have alone."""

from pathlib import Path

import pytest
import torch
from helpers import why_skip
from processes import run_script

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("beside_communication.py")


def run(case: str, folder: Path, **more: str) -> None:
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    # The script ends by itself where it hangs.
    done = run_script(SCRIPT, case, folder / "store", timeout=240, **more)
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
