# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One shape of the benchmark: check every provider, then time those that passed. A record is one cell of the result:

op, rows, cols, dtype, provider     what
us, us_p10, us_p90, samples         device microseconds per call: median, spread, number of samples
gb_per_s, copy_fraction             compulsory bytes over that time, and its share of the same run's copy ceiling
host_us                             host microseconds per eager call; of "both" by autograd
errors                              largest relative error of y, rstd, dx, dw against float64, see check.py
workspace_bytes                     device memory that a call takes beside its outputs
error                               why there are no figures, None where there are

Without a GPU the time is the wall clock's and copy_fraction, host_us and workspace_bytes are None.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.check import Inputs, errors_of, make_inputs, rstd_for, run_all
from bench.providers import Provider, make_provider
from bench.shapes import Shape, compulsory_bytes
from tilegym_rmsnorm.accuracy import Errors, Outputs, why_wrong
from tilegym_rmsnorm.timer import (
    Call,
    DeviceTimer,
    Sampler,
    Timing,
    calls_needed,
    host_sampler,
    interleave,
    sets_needed,
)

Record = dict[str, Any]
Failures = dict[str, str]  # by provider: one line each
HOST_SECONDS = 0.03
ALLOCATION_STEP = 512  # torch's allocator rounds up to it


class ContextLostError(RuntimeError):
    """A kernel broke the CUDA context: nothing more can run in this process."""


class Bench:
    """Measures shapes on one device with the providers and ops named."""

    def __init__(self, providers: tuple[str, ...], ops: tuple[str, ...], device: torch.device):
        self.providers, self.ops, self.device = providers, ops, device
        self.is_cuda = device.type == "cuda"
        self.timer = DeviceTimer(device)
        self.copy_bytes_per_second = self.timer.copy_bytes_per_second() if self.is_cuda else None

    def measure(self, shape: Shape, dtype: torch.dtype, progress: Callable[[str], None]) -> list[Record]:
        """The records of all ops and providers at one shape; `progress` is told what comes next."""
        rows, cols = shape
        bytes_read = dtype.itemsize * (rows * cols + cols)
        inputs = make_inputs(shape, dtype, self.device, sets_needed(bytes_read, self.device))
        providers = [make_provider(name, shape, dtype, self.device) for name in self.providers]
        failures: Failures = {}
        progress("check")
        errors = self._check(providers, inputs[0], failures)
        records = []
        for op in self.ops:
            progress(op)
            records += self._measure_op(op, shape, dtype, providers, inputs, errors, dict(failures))
        return records

    def _check(self, providers: list[Provider], inputs: Inputs, failures: Failures) -> dict[str, Errors]:
        """The errors of each provider against float64; those that are wrong or raise are added to `failures`."""
        outputs: dict[str, Outputs] = {}
        for provider in providers:
            with self._contained(provider.name, failures):
                outputs[provider.name] = run_all(provider, inputs)
        errors, allowed = errors_of(outputs, inputs)
        failures.update({name: text for name in outputs if (text := why_wrong(errors[name], allowed))})
        return errors

    def _measure_op(
        self,
        op: str,
        shape: Shape,
        dtype: torch.dtype,
        providers: list[Provider],
        inputs: list[Inputs],
        errors: dict[str, Errors],
        failures: Failures,
    ) -> list[Record]:
        moved = compulsory_bytes(op, shape, dtype)
        count = calls_needed(len(inputs), moved, self.copy_bytes_per_second) if self.is_cuda else 1
        providers = [provider for provider in providers if op in provider.ops]
        self.timer.renew_pool()
        device_samplers: dict[str, Sampler] = {}
        host_samplers: dict[str, Sampler] = {}
        workspace: dict[str, int] = {}
        for provider in providers:
            name = provider.name
            if name in failures:
                continue
            with self._contained(name, failures):
                calls = [_device_call(provider, op, each) for each in inputs]
                if self.is_cuda:
                    workspace[name] = _workspace_bytes(calls[0])
                    if (call := _host_call(provider, op, inputs[0])) is not None:
                        host_samplers[name] = host_sampler(call, self.device)
                device_samplers[name] = self.timer.sampler([calls[i % len(calls)] for i in range(count)])
        device = interleave(device_samplers)
        host = interleave(
            {name: each for name, each in host_samplers.items() if name in device}, HOST_SECONDS
        )

        records = []
        for name in (provider.name for provider in providers):
            record: Record = {"op": op, "rows": shape[0], "cols": shape[1], "dtype": dtype_name(dtype)}
            record |= {"provider": name, **self._figures(moved, device.get(name))}
            record |= {
                "host_us": round(host[name].us, 2) if name in host else None,
                "errors": _rounded(errors.get(name, {})),
                "workspace_bytes": workspace.get(name),
                "error": failures.get(name),
            }
            records.append(record)
        return records

    def _figures(self, moved: int, timing: Timing | None) -> Record:
        if timing is None:
            return dict.fromkeys(("us", "us_p10", "us_p90", "samples", "gb_per_s", "copy_fraction"))
        rate = moved / (timing.us * 1e-6)
        ceiling = self.copy_bytes_per_second
        return {
            "us": round(timing.us, 3),
            "us_p10": round(timing.us_p10, 3),
            "us_p90": round(timing.us_p90, 3),
            "samples": timing.samples,
            "gb_per_s": float(f"{rate / 1e9:.5g}"),
            "copy_fraction": None if ceiling is None else round(rate / ceiling, 4),
        }

    @contextlib.contextmanager
    def _contained(self, name: str, failures: Failures) -> Iterator[None]:
        """Turns an exception of one provider into a line of `failures`, so that the others are still measured."""
        try:
            yield
        except Exception as error:
            failures[name] = describe(error)
            if self.is_cuda:
                try:
                    torch.cuda.synchronize(self.device)
                    torch.cuda.empty_cache()
                except RuntimeError as lost:
                    raise ContextLostError(f"{name}: {failures[name]}; then {_one_line(lost)}") from lost


def describe(error: BaseException) -> str:
    """One line: the exception, and the one that it hides (a failed capture hides why it failed)."""
    text = _one_line(error)
    if error.__context__ is not None and not error.__suppress_context__:
        text += f" (after {_one_line(error.__context__)})"
    return text


def _one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:400]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounded(errors: Errors) -> dict[str, float | None]:
    """Three digits; None for what JSON cannot say (a NaN is in the record's `error`)."""
    return {kind: float(f"{error:.3g}") if math.isfinite(error) else None for kind, error in errors.items()}


def _device_call(provider: Provider, op: str, inputs: Inputs) -> Call:
    x, dy, weight = inputs.x, inputs.dy, inputs.weight
    if op == "forward":
        return functools.partial(provider.forward, x, weight)
    if op == "backward":
        return functools.partial(provider.backward, x, dy, weight, rstd_for(provider, inputs))
    return functools.partial(provider.both, x, dy, weight)


def _host_call(provider: Provider, op: str, inputs: Inputs) -> Call | None:
    if op != "both":
        return _device_call(provider, op, inputs)
    if provider.norm is None:
        return None
    return functools.partial(provider.autograd, inputs.x_leaf, inputs.dy, inputs.weight_leaf)


def _workspace_bytes(call: Call) -> int:
    """The most device memory that was allocated during a call, less what it had before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs: tuple[Tensor, ...] = call()
    torch.cuda.synchronize()
    returned = sum(_rounded_up(output.untyped_storage().nbytes()) for output in outputs)
    return max(0, torch.cuda.max_memory_allocated() - before - returned)


def _rounded_up(size: int) -> int:
    return -(-size // ALLOCATION_STEP) * ALLOCATION_STEP
