# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One shape and dtype of a family: its ops checked once, then timed op by op, as measure/cell.py does it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from bench.block import check as block_check
from bench.block import families
from bench.block.families import BlockInputs, Family
from bench.block.peers import make_providers
from bench.block.providers import BlockProvider, served_by
from bench.measure.cell import Cell
from bench.measure.check import check_form, poison
from bench.measure.shapes import Shape
from bench.providers.ours import OURS, backend_of
from tilegym_rmsnorm.measure.accuracy import Errors, Outputs
from tilegym_rmsnorm.measure.timer import Call


class BlockCell(Cell):
    """The providers of some ops of one family."""

    seconds, host_seconds = 0.03, 0.01  # a dozen samples: there are many cells

    def __init__(self, family: Family, *of_all: Any):
        self.family = family
        self.lenient: set[str] = set()  # labels
        super().__init__(*of_all)

    def ops_of_all(self) -> tuple[str, ...]:
        return self.bench.ops

    def make_providers(self, name: str) -> list[BlockProvider]:
        found = make_providers(name, self.family, self.shape, self.dtype, self.bench.device)
        self.lenient |= {each.label for each in found if each.is_lenient}
        if backend_of(name) == OURS:  # which can say what kernel serves an op
            (own,) = found
            return [
                dataclasses.replace(own, served_by=lambda op: served_by(op, own.calls[op], self.inputs[0]))
            ]
        return found

    def checked_ops(self, provider: BlockProvider) -> tuple[str, ...]:
        return tuple(op for op in self.bench.ops if op in provider.calls)

    def run_op(self, provider: BlockProvider, op: str) -> Outputs:
        """Freed memory is poisoned before, as check.run_op does it."""
        poison(self.inputs[0].packed, copies=4)
        return run_op(self.family, provider, op, self.inputs[0])

    def errors_of(self, outputs: dict[str, Outputs]) -> tuple[dict[str, Errors], Errors]:
        return block_check.errors_of(outputs, self.inputs[0], self.lenient.intersection(outputs))

    def compulsory_bytes(self, op: str) -> int:
        return families.compulsory_bytes(op, self.shape, self.dtype)

    def device_call(self, provider: BlockProvider, op: str, inputs: BlockInputs) -> functools.partial:
        return functools.partial(provider.calls[op], _inputs_for(provider, inputs))

    def host_call(self, provider: BlockProvider, op: str) -> Call:
        return self.device_call(provider, op, self.inputs[0])


def run_op(family: Family, provider: BlockProvider, op: str, inputs: BlockInputs) -> Outputs:
    """Run an op of the provider on one set, with outputs as "OP NAME"."""
    results = provider.calls[op](_inputs_for(provider, inputs))
    names = (f"{op} {name}" for name in family.outputs[op])
    outputs = dict(zip(names, results, strict=True))
    like = {"rstd": inputs.rstd, "dw": inputs.weight, "db": inputs.weight}
    check_form(outputs, lambda name: like.get(block_check.kind_of(name), inputs.x))
    return outputs


def first_calls(
    name: str, family: Family, ops: tuple[str, ...], shape: Shape, inputs: BlockInputs, share: slice
) -> None:
    """Every op of the provider's settings in `share` once. A failure is left to the process that measures."""
    for provider in make_providers(name, family, shape, inputs.x.dtype, inputs.x.device)[share]:
        for op in provider.ops:
            if op in ops:
                with contextlib.suppress(Exception):
                    run_op(family, provider, op, inputs)


def _inputs_for(provider: BlockProvider, inputs: BlockInputs) -> BlockInputs:
    """Clone dy for a provider that writes dx over it."""
    return dataclasses.replace(inputs, dy=inputs.dy.clone()) if provider.overwrites_dy else inputs
