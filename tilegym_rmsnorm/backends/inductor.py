# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "inductor": the reference under torch.compile. Any floating dtypes; CUDA devices with Triton, CPUs with a
C++ compiler.

One compilation per width, dtypes, casting and what the call has, shared by all batch sizes, row strides, eps, offsets
and alphas. M = 1, rows without gaps, and numbers of 0 and 1 have their own: the compiler always takes these for
constants. Heads are no layout of their own here: what is not evenly spaced is copied.

Where torch.compile fails for reasons of its own, the reference runs as it is, with one warning: in a state of the
process (number of threads, ...) beyond the eight that Dynamo compiles for, or where the compiler breaks. What the
caller must hear of, such as a lack of memory, is raised. Dispatch modes, in which Dynamo fails too, are not seen here
(gate.out_of_sight).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sysconfig
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends import checks, versions
from tilegym_rmsnorm.layout import as_rows
from tilegym_rmsnorm.reference import add_rms_norm_torch, gradients_torch, rms_norm_forward_torch
from tilegym_rmsnorm.registry import Request, Unusable, register_impl
from tilegym_rmsnorm.spec import Gradients, Outputs, Spec, Tensors, Wanted

IMPLEMENTATION = __name__
AUTO_ON_CPU = False  # each width compiles for seconds, more than a CPU run of the reference costs
_CXX_NAMES = ("g++", "clang++", "c++", "cl")
_COMPILER_PACKAGES = (
    "torch._dynamo.",
    "torch._functorch.",
    "torch._inductor.",
    "torch._subclasses.",
    "torch.fx.",
)
_REMEDY = 'name backend="triton" (CUDA devices) or backend="torch" to choose what runs'


def unusable(request: Request | None) -> Unusable | None:
    """Why torch.compile cannot run the request, or, without a request, any at all on this machine."""
    if request is None:
        return _cuda_unusable() if torch.cuda.is_available() else _cpu_unusable()
    if request.obstacle is not None:  # of DTensors Dynamo fails on some: those of sequence parallelism
        return checks.no_plain_tensors(request.obstacle)
    if request.device.type == "cpu":
        return _cpu_unusable()
    if request.device.type == "cuda":
        return _cuda_unusable()
    return Unusable(f"it is tested on cpu and cuda tensors, not on {request.device.type}", 'backend="torch"')


def _cpu_unusable() -> Unusable | None:
    names = os.environ["CXX"].split()[:1] if os.environ.get("CXX") else _CXX_NAMES
    if not any(shutil.which(name) for name in names):
        return Unusable(
            f"no C++ compiler found (looked for {', '.join(names)})", "apt-get install g++, or set CXX"
        )
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return Unusable("Python.h, which compiled code includes, is missing", "apt-get install python3-dev")
    return None


def _cuda_unusable() -> Unusable | None:
    if not versions.is_installed("triton"):
        return Unusable("torch.compile needs Triton on a CUDA device", "pip install triton")
    return None


@register_impl("rms_norm_forward", "inductor")
def rms_norm_forward(spec: Spec, tensors: Tensors) -> Outputs:
    x, weight, bias, residual = tensors
    x_rows, residual_rows = _rows(spec.n, weight, x, residual)
    given = x_rows, weight, bias, residual_rows
    dtypes = x.dtype if spec.y_dtype is None else spec.y_dtype, spec.residual_dtype
    rest = spec.eps, spec.offset, spec.alpha, spec.casting, *dtypes
    specialization = spec.casting, *dtypes, *_specialization(spec, given)
    y, rstd, residual_out = _run(_forward, specialization, given, rest)
    return _shaped(y, x), rstd, _shaped(residual_out, x)


@register_impl("rms_norm_backward", "inductor")
def rms_norm_backward(spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
    x, dy, weight, rstd, d_residual_out = tensors
    x_rows, dy_rows, d_rows = _rows(spec.n, weight, x, dy, d_residual_out)
    given = x_rows, dy_rows, weight, d_rows
    rest = rstd.detach(), spec.offset, spec.alpha, spec.casting, *wanted
    specialization = spec.casting, *wanted, *_specialization(spec, given)
    dx, d_residual, dw, db = _run(_backward, specialization, given, rest)
    return _shaped(dx, x), _shaped(d_residual, x), dw, db


def _rows(n: int, weight: Tensor | None, *tensors: Tensor | None) -> list[Any]:
    """(M, N), or (M / H, H, N) beside a weight (H, N); then without gaps."""
    if weight is None or weight.ndim == 1:
        return [None if tensor is None else as_rows(tensor, n) for tensor in tensors]
    return [None if tensor is None else tensor.reshape(-1, *weight.shape).contiguous() for tensor in tensors]


def _shaped(rows: Tensor | None, x: Tensor) -> Tensor | None:
    return rows if rows is None or rows.shape == x.shape else rows.view(x.shape)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    alpha: float,
    casting: str,
    y_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    options: Any = {"bias": bias, "offset": offset, "casting": casting, "out_dtype": y_dtype}
    if residual is None or residual_dtype is None:
        return *rms_norm_forward_torch(x, weight, eps, **options), None
    options |= {"alpha": alpha, "residual_dtype": residual_dtype}
    y, residual_out, rstd = add_rms_norm_torch(x, residual, weight, eps, **options)
    return y, rstd.reshape(-1), residual_out


def _backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    d_residual_out: Tensor | None,
    rstd: Tensor,
    offset: float,
    alpha: float,
    casting: str,
    *wanted: torch.dtype | None,
) -> Gradients:
    options: Any = {"offset": offset, "casting": casting, "alpha": alpha}
    return gradients_torch(x, dy, weight, rstd, d_residual_out, Wanted(*wanted), **options)


def _run(
    function: Callable[..., Any],
    specialization: tuple[Any, ...],
    tensors: tuple[Any, ...],
    rest: tuple[Any, ...],
) -> Any:
    """function(*tensors, *rest), compiled where that can be. tensors[0] is x; all of them are N wide, or None."""
    with _one_mode(tensors[0]):
        program = _program(function, *specialization)
        try:
            return program.get()(*_aliases(*tensors), *rest)
        except Exception as exception:
            if not _is_of_the_compiler(exception):
                raise
            result = function(*tensors, *rest)  # an error that the reference makes too is the caller's
            program.recover(exception, tensors[0])
            return result


@contextlib.contextmanager
def _one_mode(x: Tensor) -> Iterator[None]:
    """Without grad and autocast, for each of which, and each pair of them, torch.compile would compile once more."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        yield


def _specialization(spec: Spec, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """All that the compiler takes for a constant, beside what only one of the two passes has. tensors[0] is x."""
    x = tensors[0]
    assert x is not None
    numbers = (number if number in (0.0, 1.0) else None for number in (spec.offset, spec.alpha))
    kinds = (None if t is None else (t.dtype, t.ndim, t.is_contiguous()) for t in tensors)
    return x.device, *x.shape[1:], x.shape[0] == 1, *numbers, *kinds


@functools.cache
def _program(function: types.FunctionType, *_specialization: Any) -> _Program:
    return _Program(function)


class _Program:
    """What runs one specialization of a pass: `function` compiled, for as long as the compiler does its part."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._callable: Callable[..., Any] | None = None
        self._is_final = False
        self._told: set[type] = set()

    def get(self) -> Callable[..., Any]:
        if self._callable is None:
            self._callable = self._compiled()
        return self._callable

    def _compiled(self) -> Callable[..., Any]:
        """`function` compiled apart from every other specialization.

        Each gets a code object of its own: torch.compile counts recompilations per code object and gives up after 8,
        which the widths of one model's norms can reach.
        """
        function = self._function
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        # dynamic=True: M, eps and offset are symbols from the first compilation on; the width is marked as none.
        return torch.compile(own, fullgraph=True, dynamic=True)

    def recover(self, exception: Exception, x: Tensor) -> None:
        """Choose what runs from now on, so that no later call fails, or compiles in vain, for the same reason."""
        from torch._dynamo import config, decorators, exc

        is_of_compiling = isinstance(exception, (exc.TorchDynamoException, exc.FailOnRecompileLimitHit))
        if config.disable:
            self._callable = None  # Dynamo skips this code from now on, also when it is enabled again
        elif _is_passing(exception):
            pass
        elif is_of_compiling and not self._is_final:
            # Where an earlier compilation fits, that; else `function` as it is. Nothing is compiled any more: the limit
            # stays reached, and a compiler that breaks does so after seconds.
            self._callable, self._is_final = decorators.run(self.get()), True
        else:
            self._callable = self._function  # what was compiled fails, or Dynamo skips the code for good
        if type(exception) not in self._told:
            self._told.add(type(exception))
            self._warn(exception, x)

    def _warn(self, exception: Exception, x: Tensor) -> None:
        reason = textwrap.shorten(str(exception.__cause__ or exception).partition("\n\n")[0], 200)
        warnings.warn(
            f'backend "inductor": torch.compile failed in {self._function.__name__} of {x.shape[-1]} columns of '
            f"{x.dtype} on {x.device}, with {type(exception).__name__}: {reason}. The reference runs in its "
            f"place: right, and slower. To mend it: {_REMEDY}.",
            stacklevel=2,
        )


def _is_of_the_compiler(exception: BaseException) -> bool:
    """Whether Dynamo or Inductor raised it for reasons of theirs.

    Its type says so or, since some are plain RuntimeErrors, the code that raised it. Out of memory is the caller's,
    whatever it is wrapped in.
    """
    from torch._dynamo import exc

    cause: BaseException | None = exception
    while cause is not None:
        if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
            return False
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if isinstance(exception, (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)):
        return True
    traceback = exception.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raiser = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return f"{raiser}.".startswith(_COMPILER_PACKAGES)


def _is_passing(exception: Exception) -> bool:
    """Whether a setting that forbids to compile just now is the reason: what was compiled stays as good as it was."""
    from torch._dynamo import eval_frame, exc
    from torch.fx import _symbolic_trace

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    asks = getattr(_symbolic_trace, "is_fx_symbolic_tracing", None)
    is_traced_by_fx = asks() if asks else getattr(_symbolic_trace, "_is_fx_tracing_flag", False)  # older
    return isinstance(exception, exc.RecompileError) or stance != "default" or is_traced_by_fx


def _aliases(*tensors: Tensor | None) -> list[Tensor | None]:
    """Detached, with the width, and the number of heads, marked as constant: on aliases, so that no mark lands on a
    caller's tensor. tensors[0] is x, whose first dimension alone is none."""
    aliases = [None if tensor is None else tensor.detach() for tensor in tensors]
    assert aliases[0] is not None
    constant = aliases[0].ndim - 1
    for alias in aliases:
        if alias is not None:
            torch._dynamo.mark_static(alias, list(range(alias.ndim))[-constant:])
    return aliases
