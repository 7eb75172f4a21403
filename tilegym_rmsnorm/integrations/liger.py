# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run Liger's RMSNorm, by Liger's names and signatures, on these kernels. `register` does it in all of Liger, and
`apply_to` in a built model.

Written against liger-kernel 0.8.5, which only `register` imports. `in_place` and `row_mode` have no effect: incoming
gradients are not overwritten, and the shape decides which kernel runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from numbers import Integral
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call.options import check_one_of, checked_eps, checked_number, refuse_torch_jit_script
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.validation import check_tensor, checked_sizes_of_weight
from tilegym_rmsnorm.integrations.registration import Change, Registration, imported

CASTINGS: dict[str, Casting] = {"llama": "llama", "gemma": "once", "none": "once"}
NUMBERS = {0: "llama", 1: "gemma", -1: "none"}
INITIAL = {"ones": nn.init.ones_, "zeros": nn.init.zeros_}


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:
    """Compute Liger's `X * rstd * (W + offset)` over the last dimension, in X's dtype; differentiable.

    Args:
        X: Shape `(*, N)`.
        W: Shape `(N,)`, or None: a factor of 1.
        eps: Added to the mean of squares.
        offset: Added to W: 1 for Gemma.
        casting_mode: `"llama"`: `X * rstd` is rounded to X's dtype before the weight. `"gemma"`: only the result is
            rounded. `"none"`: as `"gemma"`; Liger itself computes 16-bit X in 16 bits, which is less exact. Or Liger's
            numbers for these, 0, 1 and -1.
        in_place: No effect: incoming gradients are not overwritten.
        row_mode: No effect.

    Returns:
        Y, of X's shape and dtype.

    Raises:
        ValueError: casting_mode is unknown, or a shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    check_tensor("X", X)
    return functional.rms_norm(X, X.shape[-1:], W, eps, offset=offset, casting=_casting(casting_mode))


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute Liger's norm of `X + R`, and return that sum too; differentiable, with the errors of `liger_rms_norm`.

    Args:
        X: Shape `(*, N)`.
        R: The residual, of X's shape.
        W: As for `liger_rms_norm`.
        eps: As for `liger_rms_norm`.
        offset: As for `liger_rms_norm`.
        casting_mode: As for `liger_rms_norm`.
        in_place: No effect.

    Returns:
        `(Y, X + R)`, both of X's shape and dtype.
    """
    check_tensor("X", X)
    check_tensor("R", R)
    casting = _casting(casting_mode)
    options: dict[str, Any] = {"offset": offset, "casting": casting, "residual": R, "residual_dtype": X.dtype}
    return functional.rms_norm(X, X.shape[-1:], W, eps, **options)


def _casting(mode: str | int) -> Casting:
    name = NUMBERS.get(int(mode), mode) if isinstance(mode, Integral) and not isinstance(mode, bool) else mode
    check_one_of("casting_mode", name, CASTINGS)
    return CASTINGS[str(name)]


class _Norm(nn.Module):
    """Base of the modules: checks the arguments, and keeps them under Liger's names beside the weight."""

    weight: Any
    __prepare_scriptable__ = refuse_torch_jit_script

    def __init__(
        self, hidden_size: int, eps: float, offset: float, casting_mode: str, init_fn: str, in_place: bool
    ) -> None:
        super().__init__()
        check_one_of("init_fn", init_fn, INITIAL)
        _casting(casting_mode)
        checked_eps(eps)
        checked_number("offset", offset)
        shape = checked_sizes_of_weight(hidden_size, "hidden_size")
        self.variance_epsilon, self.offset = eps, offset
        self.casting_mode, self.in_place = casting_mode, in_place
        self.weight = nn.Parameter(INITIAL[init_fn](torch.empty(shape)))

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}"


class LigerRMSNorm(_Norm):
    """`liger_kernel.transformers.LigerRMSNorm`, with the same parameters, attributes and state dict.

    Args:
        hidden_size: Elements of a row.
        eps: Added to the mean of squares.
        offset: Added to the weight: 1 for Gemma.
        casting_mode: As for `liger_rms_norm`.
        init_fn: Initial values of the weight: `"ones"` or `"zeros"`.
        in_place: No effect.
        row_mode: No effect.
        elementwise_affine: Whether there is a weight.

    Raises:
        ValueError: casting_mode or init_fn is unknown; hidden_size, eps or offset is out of range.
        TypeError: hidden_size, eps or offset is not a number.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        checked_sizes_of_weight(hidden_size, "hidden_size")
        super().__init__(
            hidden_size if elementwise_affine else 0, eps, offset, casting_mode, init_fn, in_place
        )
        self.row_mode, self.elementwise_affine = row_mode, elementwise_affine
        if not elementwise_affine:
            self.weight = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"weight_shape={shape}, {super().extra_repr()}, row_mode={self.row_mode}"


class _OfAModel(LigerRMSNorm):
    """`LigerRMSNorm` without elementwise_affine. A subclass may set other defaults: those of eps to row_mode."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)

    def __init_subclass__(cls: Any, defaults: tuple[Any, ...] = (), **others: Any) -> None:
        super().__init_subclass__(**others)
        if defaults:  # a copy of the constructor, so that signatures, errors and tracebacks name this class
            init: Any = _OfAModel.__init__
            cls.__init__ = FunctionType(
                init.__code__, init.__globals__, "__init__", defaults, init.__closure__
            )
            cls.__init__.__annotations__ = init.__annotations__
            cls.__init__.__qualname__ = f"{cls.__qualname__}.__init__"


class LigerRMSNormForGemma(_OfAModel, defaults=(1e-6, 1.0, "gemma", "zeros", True, None)):
    """`LigerRMSNorm` with an offset of 1, and a weight that starts at 0."""


class LigerRMSNormForGemma2(_OfAModel, defaults=(1e-6, 1.0, "gemma", "zeros", False, None)):
    """`LigerRMSNormForGemma` with Liger's `in_place=False`."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """`LigerRMSNormForGemma2` by another name."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """`LigerRMSNormForGemma2` of dim elements, without row_mode."""

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
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """`LigerRMSNormForGemma3` without an offset. with_scale: whether there is a weight, which starts at 1."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        checked_sizes_of_weight(dim, "dim")
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForOlmo2(_OfAModel, defaults=(1e-6, 0.0, "llama", "ones", False, None)):
    """`LigerRMSNorm` with Liger's `in_place=False`."""


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """`LigerRMSNormForOlmo2` by another name."""


class LigerFusedAddRMSNorm(_Norm):
    """`liger_kernel.transformers.fused_add_rms_norm.LigerFusedAddRMSNorm`, with the same parameters, attributes and
    state dict, and the errors of `LigerRMSNorm`. `forward(hidden_states, residual)` returns the norm of their sum, and
    the sum.

    Args:
        hidden_size: Elements of a row.
        eps: Added to the mean of squares.
        offset: Added to the weight: 1 for Gemma.
        casting_mode: As for `liger_rms_norm`.
        init_fn: Initial values of the weight: `"ones"` or `"zeros"`.
        in_place: No effect.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {super().extra_repr()}"


def apply_to(model: nn.Module) -> list[str]:
    """Run the Liger norms of a built model on these kernels: modules of Liger's classes, and other modules to which
    `apply_liger_kernel_to_...(model=model)` bound Liger's forward.

    Replaces `forward` on each of these modules. Class, weights, attributes, hooks and state dict stay, and a pickle has
    the forward of the class. Modules whose forward is not Liger's are left alone, so a second call finds nothing.

    Args:
        model: Any module.

    Returns:
        The names of the norms that were changed.

    Raises:
        TypeError: model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    forwards = dict(_forwards_of_liger())
    changed = []
    for name, module in model.named_modules():
        found = getattr(module.forward, "__func__", None)
        if found in forwards:
            module.forward = MethodType(forwards[found], module)
            changed.append(name)
    return changed


# Liger's classes that define a forward, and ours in its place: Liger's runs in PyTorch where there is no weight.
OURS = {
    "LigerRMSNorm": LigerRMSNorm.forward,
    "LigerRMSNormForGemma4": LigerRMSNorm.forward,
    "LigerRMSNormForMuseGlimmer": LigerRMSNorm.forward,
    "LigerFusedAddRMSNorm": LigerFusedAddRMSNorm.forward,
}


def _forwards_of_liger() -> Iterator[tuple[Any, Any]]:
    """Yield each forward of Liger's, and ours. A model has Liger's norms only where Liger is already imported."""
    for module in ("rms_norm", "fused_add_rms_norm"):
        theirs = sys.modules.get(f"liger_kernel.transformers.{module}")
        for name, ours in OURS.items():
            if hasattr(theirs, name):
                yield getattr(theirs, name).forward, ours


# Liger's classes of autograd functions: the file of each in liger_kernel.ops, and the function that serves its `apply`.
FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "LigerRMSNormFunction": ("rms_norm", liger_rms_norm),
    "LigerFusedAddRMSNormFunction": ("fused_add_rms_norm", liger_fused_add_rms_norm),
}


def register() -> Registration:
    """Make Liger run `liger_rms_norm` and `liger_fused_add_rms_norm` for all of its norms. Imports Liger.

        with register():
            model(x).sum().backward()

    Replaces `LigerRMSNormFunction` and `LigerFusedAddRMSNormFunction` in each imported module that has them under these
    names, Liger's and others', by classes with the same `apply`. Modules that import them later get the same.
    Norms that were built before keep their class, weights and state dict, and run here. Registrations may be nested and
    end in any order; the last one to end puts Liger's back.

    Returns:
        A context manager with `undo()`.

    Raises:
        ImportError: Liger is not installed, or has no such class.
        RuntimeError: The arguments of Liger's classes are not those of release 0.8.5. Nothing is replaced.
    """
    return _replacement.hold()


class _Replaced:
    """Base of the classes in the place of Liger's."""

    original: Any


class _Functions(Change):
    def make(self) -> None:
        found = list(_classes_of_liger())
        ours = {each: _in_place_of(each) for each in found if not issubclass(each, _Replaced)}
        ours |= {each.original: each for each in found if issubclass(each, _Replaced)}
        _replace(lambda each: ours.get(each, each))

    def take_back(self) -> None:
        _replace(lambda found: found.original if issubclass(found, _Replaced) else found)


_replacement = _Functions()


def _classes_of_liger() -> Iterator[Any]:
    """Yield Liger's classes, those of another implementation that LIGER_KERNEL_IMPL chose, and ours in their place."""
    for name, (file, _) in FUNCTIONS.items():
        for module in ("liger_kernel.ops", f"liger_kernel.ops.{file}"):
            needs = f"register needs Liger with {module}.{name}, such as 0.8.5. To mend it: pip install liger-kernel"
            yield imported(module, name, needs)


def _in_place_of(theirs: Any) -> type[_Replaced]:
    name = theirs.__name__
    function = FUNCTIONS[name][1]
    expected = list(inspect.signature(function).parameters)
    _, *found = inspect.signature(theirs.forward).parameters
    if found != expected[: len(found)]:
        raise RuntimeError(
            f"{name}.apply: expected the arguments {', '.join(expected)}, got {', '.join(found)}"
        )
    return type(name, (_Replaced,), {"apply": staticmethod(function), "original": theirs})


def _replace(by: Callable[[type], type]) -> None:
    for module in list(sys.modules.values()):
        for name in FUNCTIONS:
            found = getattr(module, "__dict__", {}).get(name)
            if isinstance(found, type) and (new := by(found)) is not found:
                setattr(module, name, new)
