# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Who computes a block's ops: this package's backends, PyTorch's operations one after the other, and those compiled.

Other libraries are in peers.py. "F.rms_norm" is ATen's fused norm with operations of its own around it for what
it does not have; "torch.compile" is the same, fused by Inductor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilegym_rmsnorm as tr
from bench.block.families import ALPHA, CONTROLS, BlockInputs, Family
from bench.providers import ours
from bench.providers.ours import (
    BACKENDS,
    BASELINES,
    COMPILED_MODES,
    EPS,
    LEVELLED,
    OURS,
    VLLM,
    Labelled,
    aten_backward,
    aten_backward_dx,
    aten_ops_forward,
    backend_of,
)
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.reproducibility import flags

Results = tuple[Tensor, ...]
Compute = Callable[[BlockInputs], Results]  # of one op, its outputs in the order of Family.outputs
PLAIN_OPS = ("frozen_weight_backward", *CONTROLS.values())


@dataclass(frozen=True)
class BlockProvider(Labelled):
    """One way to compute some ops of families.py."""

    name: str
    calls: dict[str, Compute]
    settings: str = ""
    is_lenient: bool = False  # it may normalize the sum with the residual before that is rounded
    overwrites_dy: bool = False  # the backward returns dx in dy's memory
    served_by: Callable[[str], str] | None = None  # of cutile: the kernel that serves an op

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(self.calls)


def own_provider(backend: str) -> BlockProvider:
    forward = functools.partial(tr.rms_norm_forward, eps=EPS, backend=backend)
    backward = functools.partial(tr.rms_norm_backward, backend=backend)
    calls: dict[str, Compute] = {
        "residual_forward": lambda t: forward(t.x, t.weight, residual=t.residual),
        "residual_backward": lambda t: backward(
            t.normalized, t.dy, t.weight, t.rstd, d_residual_out=t.d_residual_out
        ),
        "scaled_residual_backward": functools.partial(_own_scaled_backward, backend),
        "qk_norm_forward": lambda t: forward(t.x, t.weight),
        "qk_norm_backward": lambda t: backward(t.x, t.dy, t.weight, t.rstd),
        "bias_forward": lambda t: forward(t.x, t.weight, bias=t.bias),
        "bias_backward": lambda t: backward(t.x, t.dy, t.weight, t.rstd, needs_db=True),
        "frozen_weight_backward": lambda t: (ours.backward_dx(backend, t.x, t.dy, t.weight, t.rstd),),
    }
    controls: dict[str, Compute] = {
        "contiguous_forward": lambda t: forward(t.packed, t.weight),
        "contiguous_backward": lambda t: backward(t.packed, t.packed_dy, t.weight, t.rstd),
        "no_bias_forward": lambda t: forward(t.x, t.weight),
        "no_bias_backward": lambda t: backward(t.x, t.dy, t.weight, t.rstd),
    }
    return BlockProvider(backend, calls | controls if backend == OURS else calls)


def served_by(op: str, call: Compute, inputs: BlockInputs) -> str:
    """The kernel that does the work of one call of cutile, and its settings; of an op whose form no kernel takes, the
    kernel of the plain call that PyTorch's operations stand around. Nothing, where cutile launched nothing."""
    from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher
    from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN

    plans, bind = [], Launcher.bind

    # Seen, not asked for: what is asked for anew could differ from what is timed.
    def noted(self: Launcher, *arguments: Any) -> Callable[..., Any] | None:
        plans.append(self.plan)
        return bind(self, *arguments)

    with mock.patch.object(Launcher, "bind", noted):
        call(inputs)
    is_composed = op not in PLAIN_OPS and any(plan.problem.form == PLAIN for plan in plans)
    text = "; ".join(dict.fromkeys(str(plan.first) for plan in plans))
    return f"composed around {text}" if is_composed else text


def _own_scaled_backward(backend: str, t: BlockInputs) -> Results:
    # As autograd asks a backend; no public op of gradients takes that wish.
    dtype = t.x.dtype
    request = registry.Request(t.x.device, dtype, t.weight.dtype, "once", reproducible=flags())
    backward = registry.dispatch("rms_norm_backward", request, backend)
    spec = Spec(t.x.shape[-1], EPS, 0.0, "once", t.alpha, residual_dtype=dtype, reproducible=flags())
    tensors = (t.normalized, t.dy, t.weight, t.rstd, t.d_residual_out)
    dx, d_residual, dw, _ = backward(spec, tensors, Wanted(dtype, dtype, dtype))
    return dx, d_residual, dw


# PyTorch's own. Functions of tensors alone, which torch.compile can take.


def _residual_forward(x: Tensor, weight: Tensor, residual: Tensor) -> Results:
    total = x + residual
    y, rstd = aten_ops_forward(total, weight)
    return y, total, rstd


def _residual_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor, d_out: Tensor) -> Results:
    dx, dw = aten_backward(x, dy, weight, rstd)
    return dx + d_out, dw


def _scaled_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor, d_out: Tensor) -> Results:
    d, dw = _residual_backward(x, dy, weight, rstd, d_out)
    return ALPHA * d, d, dw


def _bias_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
    y, rstd = aten_ops_forward(x, weight)
    return y + bias, rstd


def _bias_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> Results:
    return *aten_backward(x, dy, weight, rstd), dy.sum(dim=0)


def _frozen_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> Results:
    return (aten_backward_dx(x, dy, weight, rstd),)


def torch_calls(wrap: Callable[[Callable[..., Results]], Callable[..., Results]]) -> dict[str, Compute]:
    """The ops by PyTorch's own operations, each function of tensors passed through `wrap`. ATen keeps rstd with as many
    dimensions as x."""
    add, with_bias, forward = wrap(_residual_forward), wrap(_bias_forward), wrap(aten_ops_forward)
    names = (_residual_backward, _scaled_backward, aten_backward, _bias_backward, _frozen_backward)
    residual, scaled, backward, bias, frozen = map(wrap, names)

    def gradients(function: Callable[..., Results], *others: str) -> Compute:
        def call(t: BlockInputs) -> Results:
            rstd = t.rstd.view(*t.normalized.shape[:-1], 1)
            return function(t.normalized, t.dy, t.weight, rstd, *(getattr(t, name) for name in others))

        return call

    return {
        "residual_forward": lambda t: add(t.x, t.weight, t.residual),
        "residual_backward": gradients(residual, "d_residual_out"),
        "scaled_residual_backward": gradients(scaled, "d_residual_out"),
        "qk_norm_forward": lambda t: forward(t.x, t.weight),
        "qk_norm_backward": gradients(backward),
        "bias_forward": lambda t: with_bias(t.x, t.weight, t.bias),
        "bias_backward": gradients(bias),
        "frozen_weight_backward": gradients(frozen),
    }


def eager_provider(device: torch.device) -> BlockProvider:
    """Offer only forwards on a CPU, where ATen has no kernel of the backward."""
    calls = torch_calls(lambda function: function)
    if device.type != "cuda":
        return BlockProvider("F.rms_norm", {op: call for op, call in calls.items() if op.endswith("forward")})
    ours.remove_overrides()
    return BlockProvider("F.rms_norm", calls)


def compiled_providers(name: str, family: Family, device: torch.device) -> list[BlockProvider]:
    """torch.compile by one of its modes, as ours.compiled_providers has it. A family whose settings are not tried
    has the usual mode alone."""
    if name != BASELINES[1] and not family.tries_settings:
        return []
    return [
        BlockProvider(name, torch_calls(functools.partial(ours.compiled, options=options)), text, True)
        for text, options in ours.compiled_settings(name, device).items()
    ]


def make_block_providers(name: str, family: Family, device: torch.device) -> list[BlockProvider]:
    """The providers of that name, one for each setting; none of a name that has none of these ops."""
    if name in BACKENDS or name in LEVELLED:
        own = own_provider(backend_of(name))
        refuses = name in LEVELLED and LEVELLED[name][1] == VLLM  # a bias, see ours.py
        calls = {op: call for op, call in own.calls.items() if not (refuses and op.startswith("bias"))}
        return [dataclasses.replace(own, name=name, calls=calls)]
    if name == "F.rms_norm":
        return [eager_provider(device)]
    return compiled_providers(name, family, device) if name in COMPILED_MODES else []
