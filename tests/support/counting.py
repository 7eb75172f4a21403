# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""A machine that counts what cuda-tile's JIT would compile, and calls and warmups that run on it."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compiling import CompilingMachine

from tilegym_rmsnorm.backends import cutile, registry
from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import warm as warming
from tilegym_rmsnorm.backends.cutile.host import warm_rope
from tilegym_rmsnorm.backends.cutile.host.warm import Calls
from tilegym_rmsnorm.backends.cutile.runtime import toolchain

META = torch.device("meta")


class CountingMachine(CompilingMachine):
    """Counts what cuda-tile's JIT would compile: kernels by their hints and signatures."""

    def __init__(self, sm_count: int, model: str | None = None) -> None:
        super().__init__(90, compiles=False, sm_count=sm_count)
        self.facts = self.facts._replace(target=toolchain.target_of(model, 90))
        self.kernels: set[tuple] = set()
        self.seen: dict[tuple, tuple] = {}

    def bind(self, function, variant, constants):
        bound = super().bind(function, variant, constants)
        hints = (function.__name__, variant.warps, variant.occupancy)

        def launch(grid, arguments):
            like = (hints, constants, tuple(map(_finer_than_a_signature, arguments)))
            if like not in self.seen:  # signatures take time
                self.symbols.clear()
                bound(grid, arguments)
                self.seen[like] = (*hints, *self.symbols[function.__name__])
            self.kernels.add(self.seen[like])

        return launch


def _finer_than_a_signature(argument):
    if isinstance(argument, tuple):
        return tuple(map(_finer_than_a_signature, argument))
    if not isinstance(argument, torch.Tensor):
        return type(argument)
    numbers = (*argument.shape, *argument.stride())
    return argument.dtype, tuple((number == 1, math.gcd(number, 16)) for number in numbers)


@contextlib.contextmanager
def running_on(machine: CountingMachine) -> Iterator[None]:
    """Calls of tensors of device "meta" run there."""
    modules, real = (launch, warming, warm_rope), launch.machine_of
    for module in modules:
        module.machine_of = lambda device: machine
    try:
        yield
    finally:
        for module in modules:
            module.machine_of = real


@contextlib.contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch, sm_count: int = 132) -> Iterator[CountingMachine]:
    """Calls of tensors of device "meta", and `warmup` and `warmup_rope`, run on a machine that counts."""
    warm = warming.warm
    monkeypatch.setattr(cutile, "unusable", lambda request: None)
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(warming, "warm", lambda device, calls: warm(META, calls))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    machine = CountingMachine(sm_count)
    with running_on(machine):
        yield machine


class Case(NamedTuple):
    """The widths that are warmed up, and the other arguments of `warmup` or `warmup_rope`."""

    width: tuple[Any, ...]
    options: dict[str, Any]


def warm(
    machine: CountingMachine, n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, **others: Any
) -> None:
    """Warm up as `warmup` does on a GPU. others: further fields of Calls."""
    with running_on(machine):
        warming.warm(META, Calls(n, dtype, weight_dtype, **others))
