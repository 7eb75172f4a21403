# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Two GPUs and NCCL: gradients that are still communicated, sequence parallelism, FSDP2, blocks that wait beside NCCL's
blocks, tensors on the other device. The first of these ended in an illegal memory access."""

from pathlib import Path

import pytest
import torch
from processes import run_script

NAMES = (
    "gradient_of_a_collective",
    "input_of_a_collective",
    "sequence_parallel",
    "fully_sharded",
    "waiting_beside_nccl",  # for SECONDS_BESIDE_NCCL, 20
    "another_device",
)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_two_gpus(name):
    script = Path(__file__).with_name("two_gpus.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_script(*launcher, script, name)
    assert done.returncode == 0, done.stderr[-4000:]
