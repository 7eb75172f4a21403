# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Sums over rows under "device": dw and db, dq_weight and dk_weight of qk_norm_rope, and main_grad; with rows behind
the others whose dy is zero, and on any number of SMs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from helpers import BF16, DEVICE
from level_rows import HEADS, Case, bits
from torch import Tensor, nn

from tilegym_rmsnorm import qk_norm_rope, reproducible, rms_norm
from tilegym_rmsnorm.routes import known_calls, main_grad

SM_COUNTS = (16, 78, 132, 148)
FORMS = ("plain", "residual", "bias", "heads", "main_grad")
KINDS_OF_ROPE = ("vectors", "heads", "main_grad")
Run = Callable[[int, int], list[Tensor]]  # rows, and rows of zeros behind them -> sums


def of_norm(case: Case, backend: str) -> Run:
    """Make a function that returns dw, and db if there is a bias, or the main_grad that dw was added to."""
    n, dtype, form = case
    heads = (HEADS,) if form == "heads" else ()
    weight = nn.Parameter(torch.randn(*heads, n, device=DEVICE).to(dtype))
    bias = torch.randn(n, device=DEVICE).to(dtype).requires_grad_() if form == "bias" else None
    main = torch.randn(n, device=DEVICE)
    if form == "main_grad":
        main_grad.mark(weight, True)

    def run(m: int, padding: int) -> list[Tensor]:
        x, dy = _rows(m, padding, (*heads, n), dtype)
        residual = torch.zeros_like(x) if form == "residual" else None
        y = rms_norm(x.requires_grad_(), n, weight, 1e-6, bias=bias, residual=residual, backend=backend)
        y = y if residual is None else y[0]
        if form == "main_grad":
            return _added([weight], [main], [y], [dy])
        return list(torch.autograd.grad(y, [weight] if bias is None else [weight, bias], dy))

    return run


def of_rope(head: int, rotary: int, kind: str, backend: str) -> Run:
    """Make a function that returns dq_weight and dk_weight, or the main_grads that they were added to. A row is a
    token."""
    heads = 8, 2
    weights = [
        nn.Parameter(torch.randn((each, head) if kind == "heads" else head, device=DEVICE).to(BF16))
        for each in heads
    ]
    mains = [torch.randn(head, device=DEVICE) for _ in heads]
    for weight in weights if kind == "main_grad" else ():
        main_grad.mark(weight, True)

    def run(m: int, padding: int) -> list[Tensor]:
        (q, dq), (k, dk) = (_rows(m, padding, (each, head), BF16) for each in heads)
        cos, sin = _rows(m, padding, (rotary,), torch.float32)
        given = [each[None].requires_grad_() for each in (q, k)]
        outs = qk_norm_rope(*given, *weights, cos, sin, eps=1e-6, rotary_dim=rotary, backend=backend)
        dys = [dq[None], dk[None]]
        if kind == "main_grad":
            return _added(weights, mains, list(outs), dys)
        return list(torch.autograd.grad(outs, weights, dys))

    return run


def _rows(m: int, padding: int, size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make x and dy: the same m rows each time, and behind them others, whose dy is zero."""
    generator = torch.Generator(DEVICE).manual_seed(m)
    x, dy = (torch.randn(m, *size, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    behind = torch.randn(padding, *size, device=DEVICE).to(dtype)
    return torch.cat((x, behind)), torch.cat((dy, torch.zeros_like(behind)))


def _added(
    weights: list[nn.Parameter], mains: list[Tensor], outs: list[Tensor], dys: list[Tensor]
) -> list[Tensor]:
    for weight, main in zip(weights, mains, strict=True):
        weight.main_grad = main.clone()
    torch.autograd.backward(outs, dys)
    assert all(each.grad is None for each in weights)
    return [each.main_grad for each in weights]


def assert_sums_are_alike(
    run: Run, backend: str, counts: Iterable[int], paddings: Iterable[int], least_sms: int = 1
) -> None:
    """Compare sums of so many rows, with none behind them on this GPU, with all others. On fewer than `least_sms` SMs
    teams have no place."""
    with reproducible("device"):
        found = {m: run(m, 0) for m in counts}
        assert all(bool(each.isfinite().all()) for sums in found.values() for each in sums)
        expected = {m: [bits(each) for each in sums] for m, sums in found.items()}

        def check(m: int, padding: int) -> None:
            found = [bits(each) for each in run(m, padding)]
            assert all(map(torch.equal, found, expected[m])), (m, padding)

        for m in expected:
            for padding in paddings:
                check(m, padding)
        for sms in SM_COUNTS:
            with told_sms(backend, sms):
                if sms < least_sms:
                    with pytest.raises(ValueError, match="expected SMs for teams of"):
                        run(100, 0)
                    continue
                for m in expected:
                    check(m, 0)


@contextlib.contextmanager
def told_sms(backend: str, count: int) -> Iterator[None]:
    """Let a backend count so many SMs."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            from tilegym_rmsnorm.backends.triton import host

            patch.setattr(host, "sm_count", lambda device: count)
            forget = known_calls.forget
        else:
            from tilegym_rmsnorm.backends.cutile.host.launcher import launcher_of
            from tilegym_rmsnorm.backends.cutile.plans.problem import LAUNCHES_AT_ONCE
            from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

            machine = machine_of(DEVICE)
            most_members = max(1, count // LAUNCHES_AT_ONCE)
            facts = machine.facts._replace(sm_count=count, most_members=most_members)
            patch.setattr(machine, "facts", facts)

            def forget() -> None:
                known_calls.forget()
                launcher_of.cache_clear()

        forget()
        try:
            yield
        finally:
            forget()
