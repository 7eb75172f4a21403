# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One shape and dtype: its providers checked once, then timed op by op. run_shape.py says what a record holds."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import torch
from torch import Tensor

from bench.block.families import ALL_OPS
from bench.measure.check import checked_ops, dy_for, errors_of, rstd_for, run_op
from bench.measure.session import Session
from bench.measure.shapes import Record, Shape, compulsory_bytes
from bench.providers.ours import LEVELLED, backend_of, in_level
from bench.providers.peers import make_providers
from tilegym_rmsnorm.measure.accuracy import Errors, Outputs, why_wrong
from tilegym_rmsnorm.measure.timer import (
    SAMPLING_SECONDS,
    Call,
    Sampler,
    Timing,
    calls_needed,
    host_sampler,
    interleave,
)

HOST_SECONDS = 0.03
FIGURES = ("us", "us_p10", "us_p90", "samples", "gb_per_s", "copy_fraction")
GRADIENT_OPS = ("forward", "backward", "both")  # of every provider that can be made at all
FAILS_WITH = {"forward": ("forward", "both"), "backward": ("backward", "both")}  # others fail alone


class Cell:
    """The providers at one shape and dtype, each with all its settings. What depends on the kind of ops is in methods
    that block/cell.py has others of."""

    seconds, host_seconds = SAMPLING_SECONDS, HOST_SECONDS  # of each provider and op

    def __init__(self, bench: Session, shape: Shape, dtype: torch.dtype, inputs: list[Any]):
        self.bench, self.shape, self.dtype, self.inputs = bench, shape, dtype, inputs
        # One line each, by provider, with its settings where it has some, and op.
        self.failures: dict[tuple[str, str], str] = {}
        self.first_calls: dict[str, float] = {}
        self.providers: dict[str, list[Any]] = {name: [] for name in bench.providers}
        outputs: dict[str, Outputs] = {}
        for name in bench.providers:
            start = time.perf_counter()
            with bench.contained(name, functools.partial(self._fail, name, self.ops_of_all())):
                self.providers[name] = self.make_providers(name)
            for provider in self.providers[name]:
                outputs[provider.label] = self._first_calls(provider)
            self.first_calls[name] = time.perf_counter() - start
        self.errors, allowed = self.errors_of(outputs)
        for label in outputs:
            if text := why_wrong(self.errors[label], allowed):
                self._fail(label, ALL_OPS, text)

    def ops_of_all(self) -> tuple[str, ...]:
        """The ops that a provider has of which nothing is known."""
        return GRADIENT_OPS

    def make_providers(self, name: str) -> list[Any]:
        return make_providers(name, self.shape, self.dtype, self.bench.device)

    def checked_ops(self, provider: Any) -> tuple[str, ...]:
        return checked_ops(provider)

    def run_op(self, provider: Any, op: str) -> Outputs:
        return run_op(provider, op, self.inputs[0])

    def errors_of(self, outputs: dict[str, Outputs]) -> tuple[dict[str, Errors], Errors]:
        return errors_of(outputs, self.inputs[0])

    def compulsory_bytes(self, op: str) -> int:
        return compulsory_bytes(op, self.shape, self.dtype)

    def device_call(self, provider: Any, op: str, inputs: Any) -> functools.partial:
        x, weight = inputs.x, inputs.weight
        if op == "forward":
            return functools.partial(provider.forward, x, weight)
        dy = dy_for(provider, inputs)
        if op == "both":
            return functools.partial(provider.both, x, dy, weight)
        function = provider.backward if op == "backward" else provider.backward_dx
        return functools.partial(function, x, dy, weight, rstd_for(provider, inputs))

    def host_call(self, provider: Any, op: str) -> Call | None:
        """Return the call; "both" by autograd, None without a norm."""
        inputs = self.inputs[0]
        if op != "both":
            return self.device_call(provider, op, inputs)
        dy = dy_for(provider, inputs)
        return provider.norm and functools.partial(provider.autograd, inputs.x_leaf, dy, inputs.weight_leaf)

    def _first_calls(self, provider: Any) -> Outputs:
        """Run each op once. An op that raises takes along those that need it."""
        outputs: Outputs = {}
        for op in self.checked_ops(provider):
            if (provider.label, op) not in self.failures:
                fail = functools.partial(self._fail, provider.label, FAILS_WITH.get(op, (op,)))
                with self.bench.contained(provider.name, fail), in_level(provider.name):
                    outputs |= self.run_op(provider, op)
                    if self.bench.is_cuda:  # what goes wrong on the GPU must not surface in another's call
                        torch.cuda.synchronize()
        return outputs

    def _fail(self, label: str, ops: tuple[str, ...], text: str) -> None:
        for op in ops:
            self.failures.setdefault((label, op), text)

    def measure(self, op: str) -> list[Record]:
        """The records of one op, of every provider that offers it."""
        bench = self.bench
        moved = self.compulsory_bytes(op)
        sets = len(self.inputs)
        count = calls_needed(sets, moved, bench.copy_bytes_per_second) if bench.is_cuda else 1
        every = self.providers.items()
        offered = {name: [each for each in several if op in each.ops] for name, several in every}
        bench.timer.renew_pool()
        samplers: dict[str, Sampler] = {}
        workspace: dict[str, int] = {}
        kept: list[list[Call]] = []  # some hold inputs of their own, to which graphs hold no references
        for provider in (each for several in offered.values() for each in several):
            label = provider.label
            if (label, op) in self.failures:
                continue
            fail = functools.partial(self._fail, label, (op,))
            with bench.contained(provider.name, fail), in_level(provider.name):
                calls = [self.device_call(provider, op, each) for each in self.inputs]
                kept.append(calls)
                if bench.is_cuda:
                    workspace[label] = _workspace_bytes(calls[0])
                sampler = bench.timer.sampler([calls[i % sets] for i in range(count)])
                samplers[label] = _in_level(provider.name, sampler)
        device = interleave(samplers, self.seconds)
        fastest = {name: _fastest(several, device) for name, several in offered.items()}
        host = self._host_times(op, [each for each in fastest.values() if each is not None])
        return [
            self._record(op, moved, name, several, fastest[name], device, host, workspace)
            for name, several in offered.items()
            if several or (not self.providers[name] and (name, op) in self.failures)
        ]

    def _host_times(self, op: str, providers: list[Any]) -> dict[str, Timing]:
        if not self.bench.is_cuda:
            return {}
        samplers = {
            each.label: _in_level(each.name, host_sampler(call, self.bench.device))
            for each in providers
            if (call := self.host_call(each, op)) is not None
        }
        return interleave(samplers, self.host_seconds)

    def _record(
        self,
        op: str,
        moved: int,
        name: str,
        offered: list[Any],
        fastest: Any | None,
        device: dict[str, Timing],
        host: dict[str, Timing],
        workspace: dict[str, int],
    ) -> Record:
        shown = fastest or (offered[0] if offered else None)
        label = name if shown is None else shown.label
        tried = {
            each.settings: _rounded_us(device.get(each.label)) or self.failures.get((each.label, op))
            for each in offered
            if each.settings
        }
        labels = dict.fromkeys((name, *(each.label for each in offered)))
        reasons = [self.failures[each, op] for each in labels if (each, op) in self.failures]
        record: Record = {"op": op, "rows": self.shape[0], "cols": self.shape[1]}
        record |= {"dtype": dtype_name(self.dtype), "provider": name}
        with in_level(name):
            record |= {"settings": _settings(fastest, op), "tried_us": tried or None}
        record |= figures(device.get(label) if fastest else None, moved, self.bench.copy_bytes_per_second)
        return record | {
            "level_ratio": _level_ratio(name, device) if self.bench.is_cuda else None,
            "host_us": round(host[label].us, 2) if label in host else None,
            "errors": rounded(self.errors.get(label, {})),
            "workspace_bytes": workspace.get(label),
            "first_calls_s": round(self.first_calls[name], 2),
            "error": None if fastest else "; ".join(dict.fromkeys(reasons)),
        }


def figures(timing: Timing | None, moved: int, ceiling: float | None) -> Record:
    """FIGURES of a call that moves so many bytes; ceiling: the rate of the copy."""
    if timing is None:
        return dict.fromkeys(FIGURES)
    rate = moved / (timing.us * 1e-6)
    return {name: round(value, 3) for name, value in dataclasses.asdict(timing).items()} | {
        "gb_per_s": float(f"{rate / 1e9:.5g}"),
        "copy_fraction": None if ceiling is None else round(rate / ceiling, 4),
    }


def _in_level(name: str, sampler: Sampler) -> Sampler:
    """The sampler, with the provider's level around each sample: what it calls anew has no other."""

    def sample() -> float:
        with in_level(name):
            return sampler()

    return sample


def _level_ratio(name: str, device: dict[str, Timing]) -> float | None:
    """The time of a backend under a level over its time without; None of others."""
    timed = name in LEVELLED and name in device and backend_of(name) in device
    return round(device[name].us / device[backend_of(name)].us, 4) if timed else None


def _fastest(providers: list[Any], device: dict[str, Timing]) -> Any | None:
    """Pick the provider's settings of the lowest median; None where none was timed."""
    timed = [each for each in providers if each.label in device]
    return min(timed, key=lambda each: device[each.label].us, default=None)


def _settings(provider: Any | None, op: str) -> str | None:
    """Name a peer's settings, or the kernel of cutile that served and its settings."""
    if provider is None:
        return None
    return provider.settings or (provider.served_by and provider.served_by(op)) or None


def failed_record(op: str, shape: Shape, dtype: str, provider: str, error: str) -> Record:
    """The record of a provider that did not get as far as being measured."""
    record: Record = {"op": op, "rows": shape[0], "cols": shape[1], "dtype": dtype, "provider": provider}
    record |= dict.fromkeys(("settings", "tried_us", *FIGURES, "level_ratio", "host_us"))
    return record | {"errors": {}, "workspace_bytes": None, "first_calls_s": None, "error": error}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounded(errors: Errors) -> dict[str, float | None]:
    """Three digits; None for what JSON cannot say (a NaN is in the record's `error`)."""
    return {kind: float(f"{error:.3g}") if math.isfinite(error) else None for kind, error in errors.items()}


def _rounded_us(timing: Timing | None) -> float | None:
    return None if timing is None else round(timing.us, 3)


def _workspace_bytes(call: functools.partial) -> int:
    """The most device memory that was asked for during a call, less what was held before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    outputs: Tensor | tuple[Tensor, ...] = call()
    torch.cuda.synchronize()
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    arguments = [tensor for each in call.args for tensor in getattr(each, "tensors", [each])]
    given = {each.data_ptr() for each in arguments if isinstance(each, Tensor)}  # dx may lie in dy's memory
    returned = sum(each.untyped_storage().nbytes() for each in tensors if each.data_ptr() not in given)
    return max(0, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - returned)
