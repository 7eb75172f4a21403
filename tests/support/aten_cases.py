# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten, for its tests: with what it is called, what it took, and that nothing is left registered.

Where there is no GPU the key of CPU tensors is overridden, whose kernels run in the interpreter. There ATen has no
backward at that key, and declined ones run by operations. conftest.py has pytest load this file, so that its fixtures
are known by name."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, FP32, HAS_GPU, Inputs, why_skip

from tilegym_rmsnorm import override_aten, set_backend
from tilegym_rmsnorm.integrations import aten
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, TAKEN

KEY = "CUDA" if HAS_GPU else "CPU"
EPS = torch.finfo(FP32).eps
fused, fused_backward = (getattr(torch.ops.aten, op).default for op in (ATEN_FORWARD, ATEN_BACKWARD))


@pytest.fixture
def kernel_backend(request, default_selection):
    """Set a backend by name, as interpreters need on a CPU, for the process: autograd's threads see no block."""
    name = getattr(request, "param", "cutile")
    if (reason := why_skip(name)) is not None:
        pytest.skip(reason)
    set_backend(name)


@pytest.fixture
def undone():
    """No test leaves anything registered."""
    before = kernels()
    yield
    assert kernels() == before and aten._patches == {"cuda": [], "cpu": []}


def kernels() -> list[str]:
    """Name the kernels that the dispatcher calls at the key."""
    return [repr(aten._kernel(op, KEY)) for op in (ATEN_FORWARD, ATEN_BACKWARD)]


def overridden():
    return override_aten(DEVICE.type)


def taken(override) -> tuple[int, int]:
    return override.stats[ATEN_FORWARD][TAKEN], override.stats[ATEN_BACKWARD][TAKEN]


def results(inputs: Inputs, eps: float | None = None, norm=F.rms_norm) -> dict[str, torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight) if t is not None]
    y = norm(leaves[0], inputs.x.shape[1:], *leaves[1:] or (None,), eps)
    gradients = torch.autograd.grad(y, leaves, inputs.dy)
    return {"y": y.detach(), **dict(zip(("dx", "dw"), gradients, strict=False))}


def norm_of(*size: int, dtype: torch.dtype = FP32, **options) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    return torch.randn(size, generator=generator, device=DEVICE).to(dtype).requires_grad_(**options)


MARKS = [
    pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning"),
    pytest.mark.usefixtures("kernel_backend", "undone"),
]
