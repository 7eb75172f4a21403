# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Who is measured: this package's backends through its public functions, and PyTorch's own RMSNorm as baselines.

Other libraries' RMSNorms are in peers.py.

"cutile[batch]" is backend "cutile" under `reproducible("batch")`, a provider of its own: whoever runs its calls does it
inside `in_level`.

The device times of a baseline's forward and backward come from `aten::_fused_rms_norm` and its backward, which compute
what this package's two public ops do, rstd included; `both` by eager autograd goes through `F.rms_norm` itself.
torch.compile compiles for each shape (dynamic=False), its fastest form, and max-autotune without its CUDA graphs:
everything here is timed in a graph already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tilegym_rmsnorm as tr
from bench.measure.shapes import OPS, Shape
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.reproducibility import flags

if TYPE_CHECKING:  # the peers run where cuda-tile is missing
    from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher
    from tilegym_rmsnorm.backends.cutile.plans.problem import Problem

EPS = 1e-6
OURS = "cutile"  # whose figures stand beside those of the best peer
BACKENDS = ("cutile", "triton", "torch")
KERNELS = BACKENDS[:2]
BASELINES = ("F.rms_norm", "torch.compile")
ROW_PARTIALS = "cutile[P=M]"
MAX_AUTOTUNE = "torch.compile-max-autotune"
COMPILED_MODES = {"torch.compile": "default", MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}
PDL = "triton.enable_pdl"  # Inductor's option, off unless asked for
# Backends under a level of reproducibility: backend and level by the provider's name. Triton alone has vLLM's order.
VLLM = "vllm"
LEVELLED = {f"{backend}[{level}]": (backend, level) for backend in KERNELS for level in ("batch", "device")}
LEVELLED |= {f"triton[{VLLM}]": ("triton", VLLM)}
OWN = (*BACKENDS, ROW_PARTIALS, *LEVELLED)
PROVIDERS = (*OWN, *BASELINES, MAX_AUTOTUNE)
# Compiled autograd, needed for the host time of `both` alone, takes seconds to compile: only where x is smaller than
# this and the host's time can exceed the device's.
COMPILED_NORM_BYTES = 16 << 20

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # x, weight -> y, rstd
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # x, dy, weight, rstd -> dx, dw
BackwardDx = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x, dy, weight, rstd -> dx


class Labelled:
    """A provider's name, and its settings where it is measured with several, the fastest of which counts."""

    name: str
    settings: str

    @property
    def label(self) -> str:
        """Unique among what is measured together."""
        return f"{self.name} ({self.settings})" if self.settings else self.name


@dataclass(frozen=True)
class Provider(Labelled):
    """One way to compute RMSNorm and its gradients over x (M, N) with weight (N,)."""

    name: str
    forward: Forward | None  # None: settings of the backward alone
    backward: Backward | None  # None: settings of the forward alone, or PyTorch has no such op on this device
    norm: Callable[[Tensor, Tensor], Tensor] | None  # differentiable; None where there is no public function
    rstd_is_column: bool = False  # aten keeps rstd as (M, 1), this package as (M,)
    backward_dx: BackwardDx | None = None  # None where nothing is saved by a frozen weight
    settings: str = ""
    overwrites_dy: bool = False  # the backward returns dx in dy's memory
    served_by: Callable[[str], str] | None = None  # of cutile: the kernel that is selected for an op

    @property
    def ops(self) -> tuple[str, ...]:
        has = {"forward": self.forward, "backward": self.backward, "dx": self.backward_dx}
        has["both"] = self.forward and self.backward
        return tuple(op for op in OPS if has[op] is not None)

    def both(self, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, rstd, dx, dw by the two ops, without autograd: what is captured to time both on the device."""
        y, rstd = self.forward(x, weight)
        return y, rstd, *self.backward(x, dy, weight, rstd)

    def autograd(self, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y, dx, dw by eager autograd; x and weight are leaves that require gradients."""
        y = self.norm(x, weight)
        return y, *torch.autograd.grad(y, (x, weight), dy)


def backend_of(name: str) -> str:
    """The backend of a provider that is one under a level; the name itself of any other."""
    return LEVELLED[name][0] if name in LEVELLED else name


def in_level(name: str) -> AbstractContextManager[None]:
    """Begin the level under which the calls of a provider run: that of the process for those that name none."""
    return tr.reproducible(LEVELLED[name][1]) if name in LEVELLED else contextlib.nullcontext()


def make_provider(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Provider:
    """The provider of that name, for one shape and dtype: torch.compile compiles anew for each."""
    if name in LEVELLED:
        return dataclasses.replace(make_provider(backend_of(name), shape, dtype, device), name=name)
    if name in BACKENDS:
        return Provider(
            name,
            lambda x, weight: tr.rms_norm_forward(x, weight, EPS, backend=name),
            lambda x, dy, weight, rstd: tr.rms_norm_backward(x, dy, weight, rstd, backend=name),
            lambda x, weight: tr.rms_norm(x, weight.shape, weight, EPS, backend=name),
            backward_dx=functools.partial(backward_dx, name) if name in KERNELS else None,
            served_by=functools.partial(_served_by, shape, dtype, device) if name == "cutile" else None,
        )
    if name == ROW_PARTIALS:
        return Provider(
            name,
            lambda x, weight: tr.rms_norm_forward(x, weight, EPS, backend="cutile"),
            functools.partial(_row_partials_backward, shape, dtype, device),
            None,
        )
    if name == "F.rms_norm":
        # CPUs have no kernel of the backward op: there autograd differentiates the forward's parts.
        if device.type != "cuda":
            return Provider(name, aten_forward, None, aten_norm, True)
        remove_overrides()
        return Provider(name, aten_forward, aten_backward, aten_norm, True, aten_backward_dx)
    if name in COMPILED_MODES:
        return compiled_providers(name, shape, dtype, device)[0]
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS)}, got {name!r}")


def compiled_providers(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """torch.compile by one of its modes: without PDL and, where it has a choice, with it."""
    is_host_bound = name != MAX_AUTOTUNE and shape[0] * shape[1] * dtype.itemsize < COMPILED_NORM_BYTES
    return [
        Provider(
            name,
            compiled(aten_ops_forward, options),
            compiled(aten_backward, options),
            compiled(aten_norm, options) if is_host_bound else None,
            True,
            settings=text,
        )
        for text, options in compiled_settings(name, device).items()
    ]


def compiled_settings(name: str, device: torch.device) -> dict[str, dict[str, object]]:
    """Inductor's options of one of its modes: without PDL and, where it has a choice, with it."""
    from torch._inductor import list_mode_options

    options = list_mode_options(COMPILED_MODES[name], dynamic=False)
    if not _has_pdl(device):
        return {"": options}
    return {f"enable_pdl={has_pdl}": options | {PDL: has_pdl} for has_pdl in (False, True)}


def _has_pdl(device: torch.device) -> bool:
    """Whether Inductor's Triton kernels can be launched so on this device, by this torch."""
    from torch._inductor import list_options

    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return is_hopper and PDL in list_options()


def backward_dx(backend: str, x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    # What autograd does for a frozen weight; no public op of gradients takes that wish.
    request = registry.Request(x.device, x.dtype, weight.dtype, "once", reproducible=flags())
    backward = registry.dispatch("rms_norm_backward", request, backend)
    spec = Spec(x.shape[1], EPS, 0.0, "once", reproducible=flags())
    dx, *_ = backward(spec, (x, dy, weight, rstd, None), Wanted(x.dtype))
    return dx


def _served_by(shape: Shape, dtype: torch.dtype, device: torch.device, op: str) -> str:
    """The kernel that does the work of an op and its settings, as a call asks for them; of both ops both."""
    from tilegym_rmsnorm.backends.cutile.host import norm

    asked = [_problem(shape, dtype, device, each) for each in (OPS[:2] if op == "both" else (op,))]
    return "; ".join(str(norm.plan_for(problem).first) for problem in asked)


def _problem(shape: Shape, dtype: torch.dtype, device: torch.device, op: str) -> Problem:
    from tilegym_rmsnorm.backends.cutile.host.norm import NAMES, policy_of
    from tilegym_rmsnorm.backends.cutile.plans.problem import Problem
    from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    name, facts = NAMES[dtype], machine_of(device).facts
    return Problem(op, shape[1], name, name, size_class(*shape), facts, policy=policy_of(flags()))


def _row_partials_backward(
    shape: Shape, dtype: torch.dtype, device: torch.device, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    return run_backward(_row_partials_launcher(shape, dtype, device), *tensors)


@functools.cache
def _row_partials_launcher(shape: Shape, dtype: torch.dtype, device: torch.device) -> Launcher:
    # No argument of the backend asks for such a plan.
    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    problem = _problem(shape, dtype, device, "backward")._replace(partials="own")
    return norm.Backward(machine_of(device), norm.plan_for(problem))


def run_backward(
    launcher: Launcher, x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dx and dw by a plan of one's own."""
    spec, wanted = Spec(x.shape[1], EPS, 0.0, "once"), Wanted(x.dtype, dw=weight.dtype)
    dx, _, dw, _ = launcher(spec, (x, dy, weight, rstd, None), wanted)
    return dx, dw


def aten_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # Not through torch.ops, which costs the host more than F.rms_norm does.
    return torch._fused_rms_norm(x, weight.shape, weight, EPS)


def aten_ops_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm.default(x, weight.shape, weight, EPS)


def aten_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm_backward.default(dy, x, weight.shape, rstd, weight, [True, True])


def aten_backward_dx(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    arguments = (dy, x, weight.shape, rstd, weight)
    return torch.ops.aten._fused_rms_norm_backward.default(*arguments, [True, False])[0]


@functools.cache
def remove_overrides() -> None:
    """Makes F.rms_norm ATen's kernels: PyTorch 2.13 replaces them where a CuTe DSL of its choice is installed.

    What it replaces them by is a peer of its own, see peers.py.
    """
    try:
        from torch._native.registry import deregister_op_overrides
    except ImportError:  # older
        return
    deregister_op_overrides(disable_op_symbols=["_fused_rms_norm", "_fused_rms_norm_backward"])


def aten_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def compiled(function: types.FunctionType, options: dict[str, object]) -> Callable[..., Any]:
    """`function` compiled apart from its other compilations, on its first call.

    Each gets a code object of its own: torch.compile counts recompilations per code object and silently runs eager
    code after 8 of them.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=False, fullgraph=True, options=options)
