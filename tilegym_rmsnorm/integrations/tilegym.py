# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run TileGym's RMSNorm, by TileGym's names and signatures, on these kernels. `register` puts them into TileGym.

Written against TileGym 1.5.1, which only `register` imports. Goes further than TileGym: a backward with an offset, no
weight, a bias, no rows, tensors on another device than the current one; shapes are checked.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call import options
from tilegym_rmsnorm.call.validation import check_tensor, checked_sizes_of_weight
from tilegym_rmsnorm.integrations.registration import Change, Registration

MODES = (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")
REGISTRY = "tilegym.backend.dispatcher"  # the module with TileGym's registry, `_REGISTRY`

_changes: dict[str, _Functions] = {}  # by TileGym's name for the backend


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int] | None,
    weight: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    mode: str | None = None,
    offset: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Compute `tilegym.ops.rms_norm`: y in input's dtype, computed in float32, rounded once; differentiable.

    Args:
        input: Shape `(*, *normalized_shape)`; float16, bfloat16, float32 or float64.
        normalized_shape: The last dimensions. None, as TileGym's own modules pass: the last one.
        weight: Shape `normalized_shape`, any of these dtypes, or None.
        eps: Added to the mean of squares.
        bias: Shape of weight, or None.
        mode: One of TileGym's kernel names, or None. No effect: the shape decides which kernel runs.
        offset: Added to weight, 1 for Gemma; in the backward too.
        **kwargs: Not used, as in TileGym.

    Returns:
        y, of input's shape.

    Raises:
        ValueError: mode is unknown, or a shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    options.check_one_of("mode", mode, MODES)
    check_tensor("input", input)
    if normalized_shape is None:
        normalized_shape = input.shape[-1:]
    return functional.rms_norm(input, normalized_shape, weight, eps, bias=bias, offset=offset)


def rms_norm_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return dx, of x's shape and dtype, and dw, of weight's, without autograd, by `tilegym_rmsnorm.rms_norm_backward`.
    x, dy: shape `(*, N)`, M rows. weight: `(N,)`. rstd: `(M,)`, float32."""
    return functional.rms_norm_backward(x, dy, weight, rstd)


def rms_norm_backward_torch(
    x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute `rms_norm_backward` by the reference, in PyTorch."""
    return functional.rms_norm_backward_torch(x, dy, weight, rstd)


def compute_rms_norm_rstd_torch(x: Tensor, eps: float) -> Tensor:
    """Compute `1 / sqrt(mean(x^2) + eps)` over the last dimension, of shape `(M,)`, float32, by the reference."""
    return functional.compute_rms_norm_rstd_torch(x, eps)


def rms_norm_backward_workspace_bytes(
    M: int, N: int, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str | int | None = None
) -> int:
    """Return the bytes that a backward of (M, N) moves through temporary memory: written once and read once, as TileGym
    counts, so twice the bytes allocated. Follows the plan of backend "cutile"; 0 where one block does it all.

    Args:
        M: Rows.
        N: Elements of a row.
        dtype: The dtype of x and weight: float16, bfloat16 or float32.
        device: A CUDA device, or `"cpu"`: the interpreter's device, of 3 SMs. None: the current CUDA device, or the
            interpreter's where there is none.

    Raises:
        ValueError: M or N is out of range, or device is of another kind.
        TypeError: M or N is not an int, or no kernel takes the dtype.
    """
    from tilegym_rmsnorm.backends.cutile.host.norm import NAMES, backward_plan

    M, N = options.checked_int("M", M, 0), options.checked_int("N", N, 1)
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, NAMES))}, got {dtype!r}")
    plan = backward_plan(M, N, dtype, _device(device))
    elements = 0
    for start in range(0, M, plan.most_rows):  # rows beyond most_rows go in launches of their own
        for shape, _ in plan.sizes(min(plan.most_rows, M - start)).temporaries.values():
            elements += math.prod(shape)
    return elements * 4 * 2  # 4 bytes each, float32 or int32; written and read


def _device(given: torch.device | str | int | None) -> torch.device:
    """Return the device, with an index if it is a CUDA device: plans are kept by index."""
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device: expected a CUDA device or 'cpu', got {given!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class TileRMSNorm(nn.Module):
    """Class returned by `get_rms_norm_module()`, with TileGym's parameters, attributes, methods and state dict.

    Args:
        hidden_size: Elements of a row.
        eps: Added to the mean of squares.
        offset: Added to the weight, which starts at 1.

    Raises:
        ValueError: hidden_size, eps or offset is out of range.
        TypeError: hidden_size, eps or offset is not a number.
    """

    __prepare_scriptable__ = options.refuse_torch_jit_script

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        options.checked_eps(eps)
        options.checked_number("offset", offset)
        self.weight = nn.Parameter(torch.ones(checked_sizes_of_weight(hidden_size, "hidden_size")))
        self.variance_epsilon = eps
        self.hidden_size = hidden_size
        self.offset = offset

    def forward(self, hidden_states: Tensor, mode: str | None = None) -> Tensor:
        return rms_norm(
            hidden_states, None, self.weight, self.variance_epsilon, mode=mode, offset=self.offset
        )

    def forward_torch(self, hidden_states: Tensor) -> Tensor:
        """Compute the forward in PyTorch, rounded as `forward` rounds."""
        shape = hidden_states.shape[-1:]
        others: dict[str, Any] = {"offset": self.offset, "backend": "torch"}
        return functional.rms_norm(hidden_states, shape, self.weight, self.variance_epsilon, **others)

    compute_rstd_torch = staticmethod(compute_rms_norm_rstd_torch)
    rms_norm_backward = staticmethod(rms_norm_backward)
    rms_norm_backward_torch = staticmethod(rms_norm_backward_torch)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, offset={self.offset}"


class TileRMSNormForGemma3(TileRMSNorm):
    """Class returned by `get_rms_norm_module("gemma3")`: `TileRMSNorm` of dim elements, whose weight starts at 0.
    casting_mode, init_fn and in_place have no effect, as in TileGym: all is computed in float32."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        checked_sizes_of_weight(dim, "dim")
        super().__init__(dim, eps, offset)
        nn.init.zeros_(self.weight)


def get_rms_norm_module(model: str = "llama") -> type[TileRMSNorm]:
    """Return the class of a model's norms.

    Args:
        model: `"gemma3"`: an offset of 1, and weights that start at 0. Any other name: Llama's.
    """
    return TileRMSNormForGemma3 if model == "gemma3" else TileRMSNorm


OPS: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm, "get_rms_norm_module": get_rms_norm_module}


def register(backend: str = "cutile") -> Registration:
    """Make `tilegym.ops.rms_norm` and `tilegym.ops.get_rms_norm_module` run these functions. Imports TileGym.

        with register():
            y = tilegym.ops.rms_norm(x, None, weight, 1e-6)

    Models that TileGym patches while a registration is in effect get the modules of this file, and keep them.

    Args:
        backend: TileGym's name for the backend whose functions are replaced, such as `"cutile"` or `"triton"`.

    Returns:
        A context manager with `undo()`.

    Raises:
        TypeError: backend is not a str.
        ImportError: TileGym is not installed.
        RuntimeError: TileGym's registry is not where release 1.5.1 has it. Nothing is replaced.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a str, got {backend!r}")
    return _changes.setdefault(backend, _Functions(backend)).hold()


def _dispatcher() -> Any:
    try:
        dispatcher = importlib.import_module(REGISTRY)
    except ModuleNotFoundError as error:
        if error.name not in ("tilegym", "tilegym.backend", REGISTRY):
            raise
        raise ImportError(
            "register needs TileGym, which is not installed. To mend it: pip install tilegym"
        ) from error
    has_registry = isinstance(getattr(dispatcher, "_REGISTRY", None), dict)
    if not has_registry or not hasattr(dispatcher, "register_impl"):
        raise RuntimeError(
            f"register knows the registry of TileGym 1.5.1, which {REGISTRY} of this release does not have"
        )
    return dispatcher


class _Functions(Change):
    """These functions in the place of those of a backend, which are kept."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.before: dict[str, Callable[..., Any] | None] = {}

    def make(self) -> None:
        dispatcher = _dispatcher()
        for name, function in OPS.items():
            found = dispatcher._REGISTRY.get(name, {}).get(self.backend)
            if found is not function:
                self.before[name] = found
                dispatcher.register_impl(name, self.backend)(function)

    def take_back(self) -> None:
        registry = _dispatcher()._REGISTRY
        while self.before:
            name, function = self.before.popitem()
            of_op = registry[name]
            if of_op.get(self.backend) is OPS[name]:
                if function is None:
                    del of_op[self.backend]
                else:
                    of_op[self.backend] = function
