# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the host does for a known call under a level: it calls no more Python functions than without one, and sees
where memory begins. No kernel runs here."""

import collections
import gc
import sys

import pytest
import torch
from helpers import BF16, FP32, HAS_GPU, settle_interpreters
from level_rows import placed
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope, reproducible, rms_norm
from tilegym_rmsnorm.routes import known_calls

pytestmark = pytest.mark.skipif(HAS_GPU, reason="calls of interpreters are counted")
M, N = 1000, 64  # several partial rows of dw, with and without a level


@pytest.fixture
def launched(backend, monkeypatch):
    """Launches do nothing, but keep the arrays that Triton's kernels would get."""
    settle_interpreters(monkeypatch)
    arrays: list[Tensor] = []
    if backend == "triton":
        from tilegym_rmsnorm.backends.triton import host

        def run(device, *launches):
            for _, _, arguments, _ in launches:
                arrays.extend(each for each in arguments.values() if isinstance(each, Tensor))

        monkeypatch.setattr(host, "run", run)
    elif backend == "cutile":
        from tilegym_rmsnorm.backends.cutile.host.launcher import launcher_of
        from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

        monkeypatch.setattr(InterpretedMachine, "bind", lambda *_: lambda grid, arguments: None)
        launcher_of.cache_clear()
    else:
        pytest.skip("it has no kernels")
    known_calls.forget()
    yield arrays
    if backend == "cutile":
        launcher_of.cache_clear()


def rows(*size, dtype=BF16):
    return torch.randn(size).to(dtype)


def norm(backend, residual=False, bias=False):
    x, added = rows(M, N).requires_grad_(), rows(M, N).requires_grad_() if residual else None
    weight, vector = rows(N).requires_grad_(), rows(N).requires_grad_() if bias else None
    leaves = [each for each in (x, added, weight, vector) if each is not None]
    options = {"residual": added, "bias": vector, "backend": backend}
    return leaves, lambda: rms_norm(x, N, weight, 1e-6, **options)


def rope(backend):
    leaves = [each.requires_grad_() for each in (rows(1, M, 4, N), rows(1, M, 2, N), rows(N), rows(N))]
    cos, sin = rows(M, N, dtype=FP32), rows(M, N, dtype=FP32)
    return leaves, lambda: qk_norm_rope(*leaves, cos, sin, eps=1e-6, backend=backend)


CALLS = {
    "plain": norm,
    "residual": lambda backend: norm(backend, residual=True),
    "bias": lambda backend: norm(backend, bias=True),
    "rope": rope,
}


def python_calls(function):
    """Count the Python functions that it calls, by name."""
    counts: collections.Counter[str] = collections.Counter()

    def note(frame, event, _):
        if event == "call":
            counts[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("kind", CALLS)
def test_a_known_call_makes_no_more_python_calls_than_without_a_level(kind, has_grad, backend, launched):
    leaves, call = CALLS[kind](backend)

    def both():
        outs = call()
        outs = outs if isinstance(outs, tuple) else (outs,)
        if has_grad:
            torch.autograd.grad(outs, leaves, [each.detach() for each in outs])

    known = {}
    has_vllms_order = backend == "triton" and kind == "plain"  # beside a residual PyTorch adds first
    levels = ("batch", "device", "vllm") if has_vllms_order else ("batch", "device")
    with torch.set_grad_enabled(has_grad):
        for level in ("run", *levels):
            with reproducible(level):
                first = python_calls(both)
                both()
                known[level] = python_calls(both)
            assert known[level].total() < first.total() / 2, "known"
    for level in levels:
        more = known[level] - known["run"]
        own = level == "vllm"  # a function of its own, which checks the form
        assert known[level].total() <= known["run"].total() + own, more


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_known_calls_see_where_memory_begins(backend, launched):
    """What is laid out as before but begins elsewhere is another call: kernels get a copy."""
    x, dy, weight = rows(M, N), rows(M, N), rows(N)

    def given_to_kernels(*memories):
        """The arrays of a forward and a backward whose x, dy and weight lie so."""
        tensors = [
            placed(each, memory).detach() for each, memory in zip((x, dy, weight), memories, strict=True)
        ]
        launched.clear()
        y = rms_norm(tensors[0].requires_grad_(), N, tensors[2].requires_grad_(), 1e-6, backend=backend)
        torch.autograd.grad(y, (tensors[0], tensors[2]), tensors[1])
        assert all(each.data_ptr() % 16 == 0 for each in launched)
        return [any(each.data_ptr() == given.data_ptr() for each in launched) for given in tensors]

    cases = [("packed",) * 3]
    for place in range(3):
        memories = ["packed"] * 3
        memories[place] = "unaligned"
        cases.append(tuple(memories))
    with reproducible("batch"):
        for memories in (*cases, *cases[::-1], *cases):
            assert given_to_kernels(*memories) == [memory == "packed" for memory in memories]
