# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Cases of test_gate.py: the backend asked for, tensors where it runs, and F.rms_norm to compare with. conftest.py has
pytest load this file, so that its fixtures are known by name.

"by address" is a backend that reads addresses on a CPU (by_address.py), by name or as the first that "auto" tries; the
others run as they do here, on a GPU by their kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import by_address
import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, why_skip
from torch import Tensor

M, N = 6, 8
CPU = torch.device("cpu")


class Named(torch.Tensor):
    """A subclass that leaves its operations to PyTorch."""


class Case(NamedTuple):
    """The value of `backend=`, and the device of the tensors."""

    name: str
    device: torch.device


CASES = {
    "by address": Case("cutile", CPU),
    "cutile": Case("cutile", DEVICE),
    "triton": Case("triton", DEVICE),
    "auto": Case("auto", DEVICE),
    "auto by address": Case("auto", CPU),
}


@pytest.fixture(params=CASES.items(), ids=CASES)
def gate_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Each of CASES, in effect; one that cannot run here is skipped with its reason."""
    title, case = request.param
    by_address.calls.clear()
    if "by address" in title:
        by_address.use(monkeypatch)
    elif case.name != "auto" and (reason := why_skip(case.name)):
        pytest.skip(reason)
    return case


@pytest.fixture
def asked_for(gate_case: Case) -> str:
    """The name for `backend=`: a kernel's backend, or "auto"."""
    return gate_case.name


@pytest.fixture
def tensors(gate_case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N), weight (N,) and dy (M, N), random; x and weight are leaves that require grad."""
    return make_tensors(gate_case.device)


def make_tensors(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(M, N, device=device), torch.rand(N, device=device) + 0.5
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(M, N, device=device)


def theirs(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, (N,), weight, eps)


def gradients_of_theirs(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(theirs(x, weight), (x, weight), dy)


def check(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def unwrapped(functional: Tensor) -> Tensor:
    """The tensor behind a functional one, after all that it still has to take over."""
    assert torch._is_functional_tensor(functional)
    torch._sync(functional)
    return torch._from_functional_tensor(functional)


def freed(tensor: Tensor) -> Tensor:
    """Free the memory of a copy, as FSDP does between uses."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_minus(tensor: Tensor) -> Tensor:
    """Add a pending minus sign: applying it reads the memory."""
    return torch._neg_view(freed(tensor))


def freed_view(tensor: Tensor) -> Tensor:
    """Make a view like FSDP's: its address is its offset, not 0."""
    flat = torch.cat([tensor.new_zeros(8), tensor.flatten()])
    view = flat[8:].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    return view
