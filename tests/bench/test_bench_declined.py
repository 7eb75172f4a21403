# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark of calls that override_aten declines."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, HAS_GPU, why_skip

from bench.studies import declined
from tilegym_rmsnorm.integrations import aten

pytestmark = pytest.mark.skipif(why_skip("cutile") is not None, reason=str(why_skip("cutile")))
CASES = declined.cases(DEVICE)


def kernels():
    return [repr(aten._kernel(op, "CUDA" if HAS_GPU else "CPU")) for op in aten.ATEN_SCHEMAS]


def test_every_call_is_declined_for_its_reason_and_nothing_is_left(capsys):
    before = kernels()
    assert declined.main(["--samples", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split()[:2] for line in lines] == [[case.op, case.reason] for case in CASES]
    assert all(float(line.split()[-2]) > 0 for line in lines)
    assert kernels() == before and not any(aten._patches.values())


def test_another_reason_is_an_error():
    """The figure would be that of another question."""
    case = CASES[0]._replace(reason="shape")
    with (
        declined.kernels_that_do_nothing(DEVICE),
        pytest.raises(RuntimeError, match="expected 'shape', counted .*'dtype': "),
    ):
        declined.added(case, DEVICE, 1)
    assert not any(aten._patches.values())


def test_memory_that_is_shared_stays_so():
    """To ask for its address would copy it, and the next call would be taken."""
    shared = [
        each
        for each in CASES[-1].arguments
        if isinstance(each, torch.Tensor) and torch._C._is_cow_tensor(each)
    ]
    assert len(shared) == 1
    with declined.kernels_that_do_nothing(DEVICE):
        declined.added(CASES[-1], DEVICE, 1)
    assert torch._C._is_cow_tensor(shared[0])
