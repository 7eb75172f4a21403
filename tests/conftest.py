# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Where there is no CUDA device, Triton's and cuTile's kernels run in their interpreters, on CPU tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton reads TRITON_INTERPRET when it is imported"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILEGYM_RMSNORM_INTERPRET", "1")

from helpers import BACKENDS, HAS_GPU, why_skip

from tilegym_rmsnorm import registry

# Files of tests that never touch a GPU: on a machine with one they run beside those that do.
WITHOUT_GPU = {
    "test_bench_compare",
    "test_bench_peers",
    "test_ci",
    "test_compile",
    "test_config",
    "test_cutile",
    "test_interpreter",
    "test_interpreter_compiler",
    "test_interpreter_hazards",
    "test_interpreter_memory",
    "test_registry",
    "test_toolchain",
    "test_triton_compile",
    "test_triton_config",
    "test_validation",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """On a GPU --dist=loadgroup means `gpu_group`: pytest-xdist 3.8 ignores its xdist_group marks under pytest 9.2."""
    if not HAS_GPU or config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GpuGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return gpu_group(nodeid) or nodeid

    return GpuGroups(config, log)


def gpu_group(nodeid: str) -> str | None:
    """Which tests share a process where there is a GPU: few at a time, so that memory and measurements hold."""
    file = Path(nodeid.split("::")[0]).stem
    if file in WITHOUT_GPU:
        return None
    if file == "test_gpu_cutile":
        return "gpu-configs"
    return "gpu-inductor" if "inductor" in nodeid else "gpu"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name; one that cannot run here is skipped with its reason."""
    reason = why_skip(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def default_selection(monkeypatch: pytest.MonkeyPatch):
    """No test inherits, or leaves behind, a choice of backend."""
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    registry.set_backend(None)
    yield
    registry.set_backend(None)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory holds NaN (integers: their largest value), so that reading it cannot look right."""

    def poison(create):
        def create_poisoned(*args, **kwargs):
            tensor = create(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
                elif tensor.dtype != torch.bool:
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return create_poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
