# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Who is measured: this package's backends through its public functions, and PyTorch's own RMSNorm as baselines.

`F.rms_norm` is eager ATen (the fused CUDA kernels, in torch since 2.9), `torch.compile` is the same ops compiled by
Inductor, one compilation per shape (dynamic=False), which is its fastest form. The device times of a baseline's
forward and backward come from `aten::_fused_rms_norm` and its backward, which compute what this package's two public
ops do, rstd included; `both` by eager autograd goes through `F.rms_norm` itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import tilegym_rmsnorm as tr
from bench.shapes import Shape

EPS = 1e-6
BACKENDS = ("cutile", "triton", "inductor", "torch")
BASELINES = ("F.rms_norm", "torch.compile")
ROW_PARTIALS = "cutile[P=M]"
PROVIDERS = (*BACKENDS, ROW_PARTIALS, *BASELINES)
# Compiled autograd, needed for the host time of `both` alone, takes seconds to compile: only where x is smaller than
# this and the host's time can exceed the device's.
COMPILED_NORM_BYTES = 16 << 20

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # x, weight -> y, rstd
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # x, dy, weight, rstd -> dx, dw


@dataclass(frozen=True)
class Provider:
    """One way to compute RMSNorm and its gradients over x (M, N) with weight (N,)."""

    name: str
    forward: Forward
    backward: Backward | None  # None where PyTorch offers no such op on this device
    norm: Callable[[Tensor, Tensor], Tensor] | None  # differentiable; None where there is no public function
    rstd_is_column: bool = False  # aten keeps rstd as (M, 1), this package as (M,)

    @property
    def ops(self) -> tuple[str, ...]:
        return ("forward",) if self.backward is None else ("forward", "backward", "both")

    def both(self, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, rstd, dx, dw by the two ops, without autograd: what is captured to time both on the device."""
        y, rstd = self.forward(x, weight)
        return y, rstd, *self.backward(x, dy, weight, rstd)

    def autograd(self, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y, dx, dw by eager autograd; x and weight are leaves that require gradients."""
        y = self.norm(x, weight)
        return y, *torch.autograd.grad(y, (x, weight), dy)


def make_provider(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Provider:
    """The provider of that name, for one shape and dtype: torch.compile compiles anew for each."""
    if name in BACKENDS:
        return Provider(
            name,
            lambda x, weight: tr.rms_norm_forward(x, weight, EPS, backend=name),
            lambda x, dy, weight, rstd: tr.rms_norm_backward(x, dy, weight, rstd, backend=name),
            lambda x, weight: tr.rms_norm(x, weight.shape, weight, EPS, backend=name),
        )
    if name == ROW_PARTIALS:
        return Provider(
            name,
            lambda x, weight: tr.rms_norm_forward(x, weight, EPS, backend="cutile"),
            _row_partials_backward,
            None,
        )
    if name == "F.rms_norm":
        # CPUs have no kernel of the backward op: there autograd differentiates the forward's parts.
        return Provider(name, _aten_forward, _aten_backward if device.type == "cuda" else None, _norm, True)
    if name == "torch.compile":
        is_host_bound = shape[0] * shape[1] * dtype.itemsize < COMPILED_NORM_BYTES
        return Provider(
            name,
            _compiled(_aten_ops_forward),
            _compiled(_aten_backward),
            _compiled(_norm) if is_host_bound else None,
            True,
        )
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS)}, got {name!r}")


def _row_partials_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    # No public argument chooses the plan, so this goes below the public ops; see launch.py.
    from tilegym_rmsnorm.backends.cutile import launch

    return launch.rms_norm_backward(x, dy, weight, rstd, 0.0, "once", True, plan="row_partials")


def _aten_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # Not through torch.ops, which costs the host more than F.rms_norm does.
    return torch._fused_rms_norm(x, weight.shape, weight, EPS)


def _aten_ops_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm.default(x, weight.shape, weight, EPS)


def _aten_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm_backward.default(dy, x, weight.shape, rstd, weight, [True, True])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _compiled(function: types.FunctionType) -> Callable[..., object]:
    """`function` compiled apart from its other compilations, on its first call.

    Each gets a code object of its own: torch.compile counts recompilations per code object and silently runs eager
    code after 8 of them.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=False, fullgraph=True)
