# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Check all arguments of a forward or a backward of `qk_norm_rope`: for the public functions and the library ops.

As ops/norm/checks.py: tensors are made plain first where possible, and nothing is allocated or launched before all
checks have passed.

A hint in an error says what a call with such shapes may have meant, and in which layout of q it is right: the same
shapes may have another layout, in which the call would then fit, and rotate by the number of a head or of a batch.
tests/api/test_rope_errors.py follows every hint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import default_eps
from tilegym_rmsnorm.call.options import (
    check_casting,
    check_one_of,
    checked_bool,
    checked_eps,
    checked_int,
    checked_number,
)
from tilegym_rmsnorm.call.spec import Checked
from tilegym_rmsnorm.call.tensors import is_dtensor, made_plain
from tilegym_rmsnorm.call.validation import (
    are_equal,
    check_dtensors,
    check_input,
    check_like,
    check_vector,
    fail,
    size_outside_of_trace,
    spans,
)
from tilegym_rmsnorm.call.watched import get_trace, outside_of_trace
from tilegym_rmsnorm.ops.rope.spec import RopeRounding, RopeSpec
from tilegym_rmsnorm.reproducibility import check_flags, flags

ROUNDINGS = get_args(RopeRounding)
POSITION_DTYPES = torch.int64, torch.int32
ANY_POSITION_DTYPE = " or ".join(map(str, POSITION_DTYPES))
_NAMES = "q", "k", "q_weight", "k_weight", "cos", "sin", "position_ids"
_OF_ONE = "x", "k", "weight", "k_weight", "cos", "sin", "position_ids"  # of rms_norm_rope


def checked_rope(tensors: Sequence[Any], numbers: Sequence[Any], level: int | None = None) -> Checked:
    """Check a forward: q, k, q_weight, k_weight, cos, sin, position_ids, and numbers in the order of `_checked_spec`.
    q and k have four dimensions (B, T, H, D), or three (T, H, D). k is None for `rms_norm_rope`. level: flags of
    reproducibility.py; None: of the level in effect."""
    q, k, q_weight, k_weight, *tables = tensors
    names = names_of(tensors)
    eps, offset, rotary_dim, *others = numbers
    if is_dtensor(q):
        tables = [_replicated_beside(q, each) for each in tables]
    are_plain, given = made_plain(q, k, q_weight, k_weight, *tables)
    if not are_plain:
        check_dtensors(names, given)
    if get_trace() is not None:
        rotary_dim = outside_of_trace(size_outside_of_trace, rotary_dim)
    level = flags() if level is None else check_flags(level)
    spec = outside_of_trace(_checked_spec, names, *given, eps, offset, rotary_dim, *others, level)
    return Checked(names, given, given[0].shape[-1:], spec, are_plain)


def _checked_spec(
    names: tuple[str, ...],
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float | None,
    offset: float,
    rotary_dim: int | None,
    interleaved: bool,
    casting: str,
    rope_rounding: str,
    level: int,
) -> RopeSpec:
    _check_heads(names[0], q)
    n = q.shape[-1]
    if k is not None:
        _check_heads("k", k)
        if k.ndim != q.ndim or not are_equal((*k.shape[:-2], k.shape[-1]), (*q.shape[:-2], n)):
            expected = f"shape {_shape_of_k(q)}, as q of shape {tuple(q.shape)}"
            fail(ValueError, "k", expected, f"{tuple(k.shape)}{joined(hints_for_k(q, k))}")
        if k.dtype != q.dtype:
            fail(TypeError, "k", f"the dtype of q, {q.dtype}", k.dtype)
        if k.device != q.device:
            fail(ValueError, "k", f"the device of q, {q.device}", k.device)
    _check_weight(names[2], q_weight, q, names[0])
    _check_weight(names[3], k_weight, k, "k")
    if rotary_dim is None:
        if n % 2 != 0:
            fail(ValueError, "rotary_dim", f"an even number of elements, since D, {n}, is odd", None)
        rotary_dim = n
    rotary_dim = checked_int("rotary_dim", rotary_dim, 2, ", or None")
    if rotary_dim % 2 != 0 or rotary_dim > n:
        fail(ValueError, "rotary_dim", f"an even number up to D, {n}", rotary_dim)
    check_tables(cos, sin, position_ids, q, rotary_dim, names[0])
    check_casting(casting)
    check_one_of("rope_rounding", rope_rounding, ROUNDINGS)
    return RopeSpec(
        n,
        default_eps(q.dtype) if eps is None else checked_eps(eps, hint=""),  # type: ignore[arg-type]
        checked_number("offset", offset),
        rotary_dim,
        checked_bool("interleaved", interleaved),
        casting,
        rope_rounding,
        level,
    )


def checked_rope_backward(
    tensors: Sequence[Any], numbers: Sequence[Any], level: int | None = None
) -> Checked:
    """Check a backward: the gradients of the outputs, and behind them the forward's tensors; the forward's numbers."""
    are_plain, (dq_out, dk_out) = made_plain(*tensors[:2])
    names, given, shape, spec, are_others_plain = checked_rope(tensors[2:], numbers, level)
    q, k = given[:2]
    check_like(f"d{names[0]}_out", dq_out, q, names[0])
    if k is not None:
        check_like("dk_out", dk_out, k, "k")
    elif dk_out is not None:
        fail(ValueError, "dk_out", "None without k", f"a {type(dk_out).__name__}")
    given = (dq_out, dk_out, *given)
    return Checked(names_of(given), given, shape, spec, are_plain and are_others_plain)


def names_of(tensors: Sequence[Any]) -> tuple[str, ...]:
    """Name the tensors of a forward or of a backward, as the caller knows them."""
    names = _NAMES if tensors[-6] is not None else _OF_ONE
    return names if len(tensors) == len(names) else (f"d{names[0]}_out", "dk_out", *names)


def _replicated_beside(q: Any, table: Any) -> Any:
    """Make a DTensor of a plain table, or of plain positions, which models hold as buffers: all of it everywhere."""
    if not isinstance(table, Tensor) or is_dtensor(table):
        return table
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(table, q.device_mesh, [Replicate()] * q.device_mesh.ndim, run_check=False)


def _check_heads(name: str, x: Tensor) -> None:
    check_input(name, x)
    if x.ndim not in (3, 4) or x.shape[-1] == 0:
        hint = ": view it as (T, H, D)" if x.ndim == 2 else ""
        fail(ValueError, name, "shape (B, T, H, D) or (T, H, D), D at least 1", f"{tuple(x.shape)}{hint}")


def _shape_of_k(q: Tensor) -> str:
    leading = "".join(f"{size}, " for size in q.shape[:-2])
    return f"({leading}any number of heads, {q.shape[-1]})"


def _check_weight(name: str, weight: Tensor | None, x: Tensor | None, x_name: str) -> None:
    if weight is None:
        return
    if x is None:
        fail(ValueError, name, "None without k", f"a {type(weight).__name__}")
    shape = x.shape[-2:] if isinstance(weight, Tensor) and weight.ndim == 2 else x.shape[-1:]
    if isinstance(weight, Tensor) and not are_equal(weight.shape, shape):
        h, n = x.shape[-2:]
        hints = hints_to_split(x, x_name) if weight.ndim == 1 and 0 < weight.shape[0] < n else []
        expected = f"shape ({n},), or ({h}, {n}) of the heads of {x_name}"
        fail(ValueError, name, expected, f"{tuple(weight.shape)}{joined(hints)}")
    check_vector(name, weight, x, shape, x_name)


def check_tables(
    cos: Tensor, sin: Tensor, position_ids: Tensor | None, q: Tensor, rotary_dim: int, q_name: str
) -> None:
    (length, batch), half = (q.shape[-3], q.shape[0] if q.ndim == 4 else 1), rotary_dim // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            fail(TypeError, name, "a torch.Tensor", type(table).__name__)
        if table.dtype != q.dtype and table.dtype != torch.float32:
            expected = "torch.float32"
            if q.dtype != torch.float32:
                expected += f" or the dtype of {q_name}, {q.dtype}"
            # no hint for complex tables: float() would drop sin, and both tables would be cos
            hint = f": pass {name}.float()" if table.dtype.is_floating_point else ""
            fail(TypeError, name, expected, f"{table.dtype}{hint}")
        if table.layout is not torch.strided:
            fail(TypeError, name, f"layout {torch.strided}", table.layout)
        if table.device != q.device:
            fail(ValueError, name, f"the device of {q_name}, {q.device}", table.device)
        if table.requires_grad and torch.is_grad_enabled():
            fail(ValueError, name, "a table without a gradient: detach() it", "one that requires grad")
        if table.ndim == 0 or table.shape[-1] not in (rotary_dim, half):
            expected = (
                f"{rotary_dim} columns, one for each rotated element, or {half}, one for each pair of them"
            )
            hints = hints_for_columns(table, half, q, q_name)
            fail(ValueError, name, expected, f"shape {tuple(table.shape)}{joined(hints)}")
    if not are_equal(sin.shape, cos.shape) or sin.dtype != cos.dtype:
        expected = f"shape and dtype of cos, {tuple(cos.shape)}, {cos.dtype}"
        fail(ValueError, "sin", expected, f"{tuple(sin.shape)}, {sin.dtype}")
    if position_ids is not None:
        _check_positions(position_ids, q, length, batch, q_name)
        if cos.ndim != 2 or cos.shape[0] == 0:
            expected = "two dimensions, (positions, columns), and a position at least, with position_ids"
            hints = hints_for_table(cos, q, q_name)
            fail(ValueError, "cos", expected, f"{tuple(cos.shape)}{joined(hints)}")
    # The number of dimensions first: or else an exported graph would hold that B is not T.
    elif not 2 <= cos.ndim <= 3 or not _is_for(cos.shape[:-1], length, batch):
        columns = cos.shape[-1]
        expected = (
            f"{_any_shape((length, columns), (1, length, columns), (batch, length, columns))}, since {q_name} of shape "
            f"{tuple(q.shape)} has {length} position{'s' * (length != 1)}"
        )
        hints = hints_for_rows(cos, q, length, batch, q_name)
        fail(ValueError, "cos", expected, f"{tuple(cos.shape)}{joined(hints)}")


def _is_for(shape: torch.Size, length: int, batch: int) -> bool:
    """Whether a shape is (length,), (1, length) or (batch, length)."""
    return are_equal(shape[-1:], (length,)) and (len(shape) == 1 or spans(shape[0], batch))


def _any_shape(*shapes: tuple[int, ...]) -> str:
    *others, last = map(str, dict.fromkeys(shapes))
    return f"shape {', '.join(others)} or {last}"


def _check_positions(position_ids: Tensor, q: Tensor, length: int, batch: int, q_name: str) -> None:
    if not isinstance(position_ids, Tensor):
        fail(TypeError, "position_ids", "a torch.Tensor or None", type(position_ids).__name__)
    if position_ids.dtype not in POSITION_DTYPES:
        is_integer = not (position_ids.dtype.is_floating_point or position_ids.dtype.is_complex)
        hint = ": pass position_ids.long()" * (is_integer and position_ids.dtype is not torch.bool)
        fail(TypeError, "position_ids", ANY_POSITION_DTYPE, f"{position_ids.dtype}{hint}")
    if position_ids.layout is not torch.strided:
        fail(TypeError, "position_ids", f"layout {torch.strided}", position_ids.layout)
    if not 1 <= position_ids.ndim <= 2 or not _is_for(position_ids.shape, length, batch):
        expected = (
            f"{_any_shape((length,), (1, length), (batch, length))}, as {q_name} of shape {tuple(q.shape)}"
        )
        fail(ValueError, "position_ids", expected, tuple(position_ids.shape))
    if position_ids.device != q.device:
        fail(ValueError, "position_ids", f"the device of {q_name}, {q.device}", position_ids.device)


def joined(hints: list[str]) -> str:
    """Return what stands behind an error's text."""
    return f": {'; '.join(hints)}" if hints else ""


def hints_for_k(q: Tensor, k: Tensor) -> list[str]:
    """Say how k gets q's batches and positions, and D."""
    if k.shape[-1] != q.shape[-1]:
        return hints_to_split(q, "q")
    if k.ndim != q.ndim:
        return []
    return [
        _hint_to_transpose(q, *names, by_heads=True, other=other)
        for names, other in ((("q", "k"), None), (("q",), "k"), (("k",), "q"))
        if _leading(q, "q" in names) == _leading(k, "k" in names)
    ]


def _leading(x: Tensor, is_turned: bool) -> tuple[int, ...]:
    """Return the batches and positions of heads, which may come before the sequence."""
    return *x.shape[:-3], x.shape[-2 if is_turned else -3]


def hints_to_split(x: Tensor, name: str) -> list[str]:
    """Say how heads are split that may be one dimension."""
    if x.ndim != 3:
        return []
    names = _names(name)
    them = "them" if len(names) > 1 else "it"
    return [f"if {_are(names, '(B, T, H * D)')}, view {them} as (B, T, H, D)"]


def _hint_to_transpose(x: Tensor, *names: str, by_heads: bool, other: str | None = None) -> str:
    """Write how the sequence comes before the heads, or else behind the batch. other: a tensor in which it is there."""
    layout = "(T, B, H, D)" if not by_heads else "(B, H, T, D)" if x.ndim == 4 else "(H, T, D)"
    first = x.ndim - 3 if by_heads else 0
    calls = " and ".join(f"{name}.transpose({first}, {first + 1})" for name in names)
    condition = _are(names, layout)
    if other is not None:
        condition += f" and {_are_as_taken(x, other)}"
    return f"if {condition}, pass {calls}"


def _are_as_taken(x: Tensor, *names: str) -> str:
    return _are(names, "(B, T, H, D)" if x.ndim == 4 else "(T, H, D)")


def _are(names: tuple[str, ...], layout: str) -> str:
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} {layout}"


def _names(name: str) -> tuple[str, ...]:
    """Name all heads of the call that has heads of this name."""
    return ("x",) if name == "x" else ("q", "k")


def hints_for_columns(table: Tensor, half: int, q: Tensor, q_name: str) -> list[str]:
    """Say which rotary_dim may be meant by a table of fewer columns than half of it."""
    columns = table.shape[-1] if table.ndim else 0
    if not 0 < columns < half:
        return []
    names = _names(q_name)
    each = f"{columns}, if they are one for each rotated element, or " if columns % 2 == 0 else ""
    values = f"{each}{2 * columns}, if one for each pair"
    condition = f"{_are_as_taken(q, *names)} and a part of each head is rotated"
    return [f"if {condition}, pass rotary_dim={values}", *hints_to_split(q, q_name)]


def hints_for_table(cos: Tensor, q: Tensor, q_name: str) -> list[str]:
    """Say how a table with extents of 1 has two dimensions, beside position_ids."""
    *leading, columns = cos.shape
    if not 0 < math.prod(leading) == max(leading, default=0):
        return []
    condition = f"{_are_as_taken(q, *_names(q_name))} and row i is of position i"
    return [f"if {condition}, view cos and sin as ({max(leading)}, {columns})"]


def hints_for_rows(cos: Tensor, q: Tensor, length: int, batch: int, q_name: str) -> list[str]:
    """Say how q and a table of other rows than q's positions come together."""
    *leading, columns = cos.shape
    names = _names(q_name)
    are_as_taken = _are_as_taken(q, *names)

    def has(*sizes: int) -> bool:
        return [size for size in leading if size != 1] == [size for size in sizes if size != 1]

    def has_rows(length: int, batch: int) -> bool:
        return has(length) or has(batch, length)

    hints = []
    if has(length):
        hints.append(f"if {are_as_taken}, view cos and sin as ({length}, {columns})")
    elif has(batch, length) or leading == [batch * length]:
        of_each = "each sequence has rows of its own, one sequence behind another"
        shape = f"({batch}, {length}, {columns})"
        hints.append(f"if {are_as_taken} and {of_each}, view cos and sin as {shape}")
    if len(leading) == 1 and leading[0] > length:
        is_table = f"if {are_as_taken} and row i is of position i"
        hints.append(f"{is_table}, pass cos[p:p + {length}] for positions from p on, or position_ids")
    if has_rows(q.shape[-2], batch):
        hints.append(_hint_to_transpose(q, *names, by_heads=True))
    if q.ndim == 4 and has_rows(q.shape[0], q.shape[1]):
        hints.append(_hint_to_transpose(q, *names, by_heads=False))
    if q.ndim == 3 and has_rows(q.shape[1], q.shape[0]):
        hints += hints_to_split(q, q_name)
    return hints
