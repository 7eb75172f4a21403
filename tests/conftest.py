# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Where there is no CUDA device, Triton's and cuTile's kernels run in their interpreters, on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton reads TRITON_INTERPRET when it is imported"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILEGYM_RMSNORM_INTERPRET", "1")

from helpers import BACKENDS, HAS_GPU, why_skip

from tilegym_rmsnorm import registry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name; one that cannot run here is skipped with its reason."""
    reason = why_skip(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def triton_interpreter_that_rounds():
    """Triton 3.6's interpreter cuts float32 off to bfloat16 where GPUs round to nearest: kernels would be judged by an
    error that is not theirs, and twice that with casting="llama"."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def round_to_nearest(data, source, target, rounding_mode):
        if (source, target) != (language.float32, language.bfloat16):
            return convert(data, source, target, rounding_mode)
        return torch.as_tensor(data).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = round_to_nearest
    yield
    interpreter._convert_float = convert


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
