# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Check single tensors, their shapes and dtypes, before anything is allocated or launched. options.py checks numbers,
names and flags; checks.py of an op calls both for a whole call.

Shapes and values that do not fit raise ValueError, dtypes and types TypeError. The text names the argument, the
expected and the given value. A check that passes costs a few comparisons; text is built on failure only.

While torch.jit.trace records, sizes are tensors, and each comparison would warn that the trace may be wrong. So shapes
are compared outside of the trace, which does not need the comparisons. Sizes that are known only when a graph runs, as
those of `x[mask]`, are compared by the graph, as PyTorch's add does.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from tilegym_rmsnorm.call.tensors import is_dtensor
from tilegym_rmsnorm.call.watched import get_trace, is_traced, outside_of_trace

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
ALL_DTYPES = DTYPES + COMPLEX_DTYPES
STRIDED = torch.strided


def check_tensor(name: str, x: Tensor) -> None:
    """Check that x is a tensor, or a proxy with `__torch_function__` as in torch.fx, before its attributes are read."""
    if not isinstance(x, Tensor) and not has_torch_function_unary(x):
        fail(TypeError, name, "a torch.Tensor", type(x).__name__)


def check_dtensors(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Check that all tensors are DTensors if one is, where PyTorch would refuse plain ones without naming them."""
    placed = next((i for i, tensor in enumerate(tensors) if is_dtensor(tensor)), None)
    if placed is None or is_traced() or _takes_plain_beside(tensors[placed]):
        return
    for name, tensor in zip(names, tensors, strict=True):
        # One element is replicated.
        if isinstance(tensor, Tensor) and not is_dtensor(tensor) and tensor.numel() != 1:
            got = f"a plain tensor of shape {tuple(tensor.shape)}"
            fail(TypeError, name, f"a DTensor as {names[placed]} is", got)


def _takes_plain_beside(tensor: Tensor) -> bool:
    """Whether `implicit_replication` is on. True where this PyTorch does not say so: it decides then."""
    dispatcher = getattr(type(tensor), "_op_dispatcher", None)
    return getattr(dispatcher, "_allow_implicit_replication", True)


def check_input(name: str, x: Tensor, is_any_kind: bool = False) -> None:
    """Check that x is a tensor of a floating dtype with at least one dimension. `is_any_kind`: or a complex tensor, or
    a nested one of layout torch.jagged, which only F.rms_norm can take."""
    dtypes = ALL_DTYPES if is_any_kind else DTYPES
    if not isinstance(x, Tensor):
        fail(TypeError, name, "a torch.Tensor", type(x).__name__)
    if x.is_nested and not (is_any_kind and x.layout is torch.jagged):
        or_jagged = ", or one of layout torch.jagged" if is_any_kind else ""
        fail(TypeError, name, f"no nested tensor{or_jagged}, but its values()", f"layout {x.layout}")
    if x.dtype not in dtypes:
        hint = ": tokens in place of embeddings?" if x.dtype in (torch.int32, torch.int64) else ""
        fail(TypeError, name, f"a dtype of {named(dtypes)}", f"{x.dtype}{hint}")
    if x.ndim == 0:
        fail(ValueError, name, "at least one dimension", "a tensor of shape ()")
    if x.layout is not STRIDED and not x.is_nested:
        fail(TypeError, name, f"layout {STRIDED}", x.layout)


def last_dims(x: Tensor, dims: int) -> torch.Size:
    if not 0 < dims <= x.ndim:
        raise ValueError(f"normalized_dims: expected 1 to {x.ndim} for x of {x.ndim} dimensions, got {dims}")
    return x.shape[-dims:]


def check_normalized_shape(
    x: Tensor, normalized_shape: int | Sequence[int], may_be_empty: bool = False
) -> tuple[int, torch.Size]:
    """Check that `normalized_shape` is the shape of x's last dimensions. Return N, its number of elements, and it.

    `may_be_empty`: rows may have no elements, as in F.rms_norm.
    """
    if get_trace() is not None:
        return outside_of_trace(_check_traced_shape, x, normalized_shape, may_be_empty)
    if type(normalized_shape) is int:
        normalized_shape = (normalized_shape,)
    elif not isinstance(normalized_shape, (tuple, list)):
        if isinstance(normalized_shape, Tensor) and normalized_shape.dtype in ALL_DTYPES:
            fail(
                TypeError,
                "normalized_shape",
                "an int or a sequence of ints",
                f"{shown(normalized_shape)}; rms_norm takes input, normalized_shape, weight, eps in this order",
            )
        normalized_shape = checked_sizes(normalized_shape)
    for size in normalized_shape:
        if type(size) is not int:  # (8.0,), (True,) and (torch.tensor(8),) would compare equal to (8,)
            normalized_shape = checked_sizes(normalized_shape)
            break
    dims = len(normalized_shape)
    shape = x.shape[-dims:]
    if dims == 0:
        fail(ValueError, "normalized_shape", "at least one dimension", "()")
    if not are_equal(shape, normalized_shape):
        if any(size < 0 for size in normalized_shape):
            fail(ValueError, "normalized_shape", "sizes of at least 1", tuple(normalized_shape))
        # Name input: in a model its shape is wrong more often than normalized_shape.
        sizes = ", ".join(map(str, normalized_shape))
        fail(ValueError, "input", f"shape (*, {sizes}), as normalized_shape says", tuple(x.shape))
    n = shape[0] if dims == 1 else math.prod(shape)
    if not may_be_empty and is_known(n, 0):
        fail(ValueError, "normalized_shape", "at least one element per row", tuple(normalized_shape))
    return n, shape


def check_weight(
    weight: Tensor | None, bias: Tensor | None, x: Tensor, shape: torch.Size, x_name: str = "x"
) -> int:
    """Check that weight and bias are None or floating tensors on x's device, of one shape: `shape`, or (H, *shape) with
    H x's dimension before the normalized ones. Return H; 0 where one weight, or none, serves all rows."""
    if get_trace() is not None:
        return outside_of_trace(check_weight, weight, bias, x, shape, x_name)
    heads = 0
    if isinstance(weight, Tensor) and weight.ndim == len(shape) + 1:
        heads_of_x = x.shape[-weight.ndim] if x.ndim >= weight.ndim else None
        if heads_of_x is None or not are_equal(weight.shape, (heads_of_x, *shape)):
            of_heads = ""
            if heads_of_x:
                per_head, count = (heads_of_x, *shape), f"{heads_of_x} head{'s' if heads_of_x > 1 else ''}"
                of_heads = f", or {per_head}, since {x_name} of shape {tuple(x.shape)} has {count}"
            fail(ValueError, "weight", f"shape {tuple(shape)}{of_heads}", tuple(weight.shape))
        is_one = is_known(heads_of_x, 0) or is_known(heads_of_x, 1)
        shape, heads = weight.shape, 0 if is_one else heads_of_x
    check_vector("weight", weight, x, shape, x_name)
    check_vector("bias", bias, x, shape, x_name)
    return heads


def check_residual(
    x: Tensor, residual: Tensor | None, alpha: float, dtype: torch.dtype | None, x_name: str = "x"
) -> None:
    """Check the residual and its numbers. Without one, alpha and dtype must have their defaults: they would act on
    nothing."""
    if residual is not None:
        check_like("residual", residual, x, x_name)
        checked_dtype("residual_dtype", dtype, COMPLEX_DTYPES if x.is_complex() else DTYPES)
    elif alpha != 1.0:
        fail(ValueError, "residual_alpha", "1.0 without a residual", alpha)
    elif dtype is not None:
        fail(ValueError, "residual_dtype", "None without a residual", dtype)


def _check_traced_shape(
    x: Tensor, normalized_shape: int | Sequence[int], may_be_empty: bool
) -> tuple[int, torch.Size]:
    """Call `check_normalized_shape` with ints for sizes that were read in the trace, as x.shape[-1:]."""
    if isinstance(normalized_shape, (tuple, list)):
        normalized_shape = tuple(map(size_outside_of_trace, normalized_shape))
    return check_normalized_shape(x, size_outside_of_trace(normalized_shape), may_be_empty)


def check_vector(name: str, vector: Tensor | None, x: Tensor, shape: torch.Size, x_name: str = "x") -> None:
    """Check that weight or bias is None, or a floating tensor of `shape` on x's device."""
    if vector is None:
        return
    if not isinstance(vector, Tensor):
        fail(TypeError, name, "a torch.Tensor or None", type(vector).__name__)
    if not are_equal(vector.shape, shape):
        fail(ValueError, name, f"shape {tuple(shape)}", tuple(vector.shape))
    if vector.dtype not in DTYPES:
        dtypes = ALL_DTYPES if x.is_complex() else DTYPES
        if vector.dtype not in dtypes:
            fail(TypeError, name, f"a dtype of {named(dtypes)}", vector.dtype)
    if vector.device != x.device:
        fail(ValueError, name, f"the device of {x_name}, {x.device}", vector.device)
    if vector.layout is not STRIDED:
        fail(TypeError, name, f"layout {STRIDED}", vector.layout)


def check_like(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Check that residual, dy or d_residual_out has x's shape, device and a floating dtype; complex for complex x."""
    if not isinstance(tensor, Tensor):
        fail(TypeError, name, "a torch.Tensor", type(tensor).__name__)
    if get_trace() is not None:
        return outside_of_trace(check_like, name, tensor, x, x_name)
    if not are_equal(tensor.shape, x.shape):
        fail(ValueError, name, f"the shape of {x_name}, {tuple(x.shape)}", tuple(tensor.shape))
    dtypes = COMPLEX_DTYPES if x.is_complex() else DTYPES
    if tensor.dtype not in dtypes:
        fail(TypeError, name, f"a dtype of {named(dtypes)}", tensor.dtype)
    if tensor.device != x.device:
        fail(ValueError, name, f"the device of {x_name}, {x.device}", tensor.device)
    if tensor.layout is not x.layout:
        fail(TypeError, name, f"layout {x.layout}", tensor.layout)


def checked_dtype(
    name: str, dtype: torch.dtype | None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> torch.dtype | None:
    """Check and return one of `dtypes`, or None."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in dtypes):
        fail(TypeError, name, f"None or a dtype of {named(dtypes)}", shown(dtype))
    return dtype


def size_outside_of_trace(size: Any) -> Any:
    """Return an int for a size that was read while torch.jit.trace records: there it is a tensor of no dimension."""
    is_size = isinstance(size, Tensor) and size.ndim == 0 and size.dtype is torch.int64
    return operator.index(size) if is_size else size


def checked_sizes(given: Any, name: str = "normalized_shape") -> tuple[int, ...]:
    """Return one index, or several, as a tuple of ints. Refuse bools, and tensors: reading may wait for a device."""
    is_sequence = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    sizes = given if is_sequence else (given,)
    # Before torch 2.13 Dynamo raises an error of its own where operator.index raises.
    if all(hasattr(size, "__index__") and not isinstance(size, (bool, Tensor)) for size in sizes):
        with contextlib.suppress(TypeError):
            return tuple(operator.index(size) for size in sizes)
    return fail(TypeError, name, "an int or a sequence of ints", shown(given))


def checked_sizes_of_weight(given: Any, name: str = "normalized_shape") -> tuple[int, ...]:
    """Check and return the shape of a new parameter, given as an index or any iterable."""
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Tensor)):
        given = tuple(given)
    sizes = checked_sizes(given, name)
    if not sizes:
        fail(ValueError, name, "at least one dimension", "()")
    if min(sizes) < 0:
        fail(ValueError, name, "sizes of at least 1", sizes)
    return sizes


def are_equal(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two shapes are equal; for sizes that are known only when a graph runs, `torch._check` compares then."""
    if not is_traced():
        with contextlib.suppress(RuntimeError):  # GuardOnDataDependentSymNode, of such sizes
            return tuple(sizes) == tuple(others)
    return are_equal_in_graph(sizes, others)


def spans(size: int, whole: int) -> bool:
    """Whether a dimension is 1, so that it is expanded, or has all of the elements. Compared as by `are_equal`."""
    return is_known(size, 1) or are_equal((size,), (whole,))


def is_known(size: int, value: int) -> bool:
    """Whether a size is this value. False for one that is known only when a graph runs."""
    if not is_traced():
        with contextlib.suppress(RuntimeError):
            return bool(size == value)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size == value)


def are_equal_in_graph(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """`are_equal` of sizes that may be symbols."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    if len(sizes) != len(others):
        return False
    i = 0
    while i < len(sizes):  # range() would be one more guard of Dynamo
        is_equal = sizes[i] == others[i]
        if not guard_or_false(is_equal):
            if not guard_or_true(is_equal):
                return False
            torch._check(is_equal)
        i += 1
    return True


def named(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


# Others may have a repr that Dynamo cannot trace, as NumPy's numbers.
_SHOWN_BY_DYNAMO = (int, float, complex, str, bytes, tuple, list, dict, type(None), torch.dtype)


def shown(value: object) -> str:
    """Show a given value in a message. The values of tensors are not read: reading may wait for a device."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if is_traced() and not isinstance(value, _SHOWN_BY_DYNAMO):
        kind = type(value).__name__
        hint = ": Dynamo takes numbers of NumPy for arrays, so pass Python's" if kind == "ndarray" else ""
        return f"an object of type {kind}{hint}"
    is_shown = not isinstance(value, (tuple, list)) or not any(isinstance(each, Tensor) for each in value)
    return repr(value) if is_shown else f"a {type(value).__name__} with tensors"


def fail(error: type[Exception], name: str, expected: str, got: object) -> NoReturn:
    """Raise `error` with the text that every check has."""
    raise error(f"{name}: expected {expected}, got {got}")
