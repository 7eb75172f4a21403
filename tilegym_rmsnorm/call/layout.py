# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arrange the tensors of a call in the shapes that backends take: as views where possible, else copies.

All tensors of rows become (M, N). Or all become (B, T, H, N), where the leading dimensions of one of them are not
evenly spaced: q and k as slices of one tensor, or a gradient that attention leaves transposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.watched import are_transforms_active, count_modes

_unsafe_view = torch.ops.aten._unsafe_view.default
_Sizes = tuple[int, ...]
View = Callable[[Tensor], Tensor] | None  # a function of one tensor; None: the tensor as it is
SEQUENCE = 256  # an extent of at least so many rows is taken for a sequence, a smaller one for heads


def as_rows(x: Tensor, n: int) -> Tensor:
    """Return x as (M, N) with last stride 1 and a row stride of at least N: a view where one exists, else a copy."""
    rows = x if x.ndim == 2 and x.shape[1] == n else x.reshape(-1, n)
    row_stride, stride = rows.stride()
    if stride == 1 and row_stride >= n:
        return rows
    return packed(rows)


def view_of_vector(vector: Tensor | None, n: int, heads: int = 0) -> View:
    """Arrange a weight or bias over all normalized dimensions as (N,), or with heads as (heads, N), contiguous."""
    shape = (heads, n) if heads else (n,)
    if vector is None or (vector.shape == shape and is_packed(vector)):
        return None

    def view(vector: Tensor) -> Tensor:
        vector = vector.reshape(shape)
        return vector if is_packed(vector) else packed(vector)

    return view


def in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """Give y, new and contiguous, x's shape without moving data. The result is no view: autograd forbids in-place
    operations on views that a custom Function returns."""
    # Not where a dispatch mode may have kept y, as selective checkpointing does.
    if type(x) is Tensor and not (are_transforms_active() or count_modes() or y._is_view()):
        return y.resize_as_(x)  # 1 us; _unsafe_view takes 3
    return _unsafe_view(y, x.shape)


def is_packed(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.stride(-1) == 1


def packed(tensor: Tensor) -> Tensor:
    """Copy a tensor to contiguous strides. contiguous() would keep any stride of a dimension of extent 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def views_of(n: int, heads: int, tensors: Sequence[Tensor | None]) -> list[View]:
    """Arrange tensors of one shape, whose last dimensions hold n elements, as rows of one call. heads: H of a per-head
    weight, else 0."""
    if not heads and all(each is None or _is_rows(each, n) for each in tensors):
        return [None if each is None else _view_of_rows(each, n) for each in tensors]
    present = [each for each in tensors if each is not None]
    found = _arrangement(n, heads, tuple(present[0].shape), tuple(each.stride() for each in present))
    views = (
        _view(each, found.shape, is_copied) for each, is_copied in zip(present, found.copies, strict=True)
    )
    return [None if each is None else next(views) for each in tensors]


def viewed(tensors: Sequence[Tensor | None], views: Sequence[View]) -> tuple[Any, ...]:
    """Apply the views that `views_of` and `view_of_vector` chose for tensors like these."""
    return tuple(
        [each if view is None else view(each) for each, view in zip(tensors, views, strict=True)]  # type: ignore[arg-type]
    )


def arranged(
    function: Any,
    spec: Any,
    tensors: Sequence[Tensor | None],
    views: Sequence[View],
    shaped: Callable[[Any, Any], Any] | None,
    *wanted: Any,
) -> Callable[[Any], Any]:
    """Bind the function of a backend for tensors like these, arranged by `views`. The result is a function of
    the tensors alone, which holds none of them.

    shaped: Gives results their shapes, from the tensors and the results; None: they have them.
    """
    if not any(views):
        return bound(function, spec, tensors, *wanted)
    run: Any = None
    viewing = [i for i, view in enumerate(views) if view is not None]
    first, is_alone = viewing[0], len(viewing) == 1
    of_one: Any = views[first]

    def run_arranged(tensors: tuple[Any, ...]) -> Any:
        nonlocal run
        if is_alone:  # 1 us less than `viewed`
            given = (*tensors[:first], of_one(tensors[first]), *tensors[first + 1 :])
        else:
            given = viewed(tensors, views)
        if run is None:  # bound here: to arrange tensors may copy them
            run = bound(function, spec, given, *wanted)
        results = run(given)
        return results if shaped is None else shaped(tensors, results)

    return run_arranged


def bound(function: Any, spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
    """Bind the function of a backend to all but its tensors, see `binding` in contract.py."""
    bind = getattr(function, "bind", None)
    if bind is None:
        return lambda tensors: function(spec, tensors, *wanted)
    return bind(spec, tensors, *wanted)


def _is_rows(x: Tensor, n: int) -> bool:
    return x.is_contiguous() or (x.ndim == 2 and x.shape[1] == n)


def _view_of_rows(x: Tensor, n: int) -> View:
    if x.ndim == 2 and x.shape[1] == n:
        row_stride, stride = x.stride()
        return None if stride == 1 and row_stride >= n else packed
    shape = x.numel() // n, n
    return _view(x, shape, is_copied=False)


def _view(x: Tensor, shape: _Sizes, is_copied: bool) -> View:
    if is_copied:
        return lambda x: packed(x).view(shape)
    if tuple(x.shape) == shape and len(shape) > 2:
        return None
    # contiguous, and yet a dimension of extent 1 may have any stride
    if len(shape) == 2 and not (x.view(shape).stride(0) >= shape[1] and x.view(shape).stride(1) == 1):
        return lambda x: packed(x.view(shape))
    return lambda x: x.view(*shape)  # view(shape) takes 0.8 us more


class _Arrangement(NamedTuple):
    shape: _Sizes  # (M, N) or (B, T, H, N)
    copies: tuple[bool, ...]  # which tensors are copied first


@functools.lru_cache(maxsize=1024)
def _arrangement(n: int, heads: int, shape: _Sizes, strides: tuple[_Sizes, ...]) -> _Arrangement:
    """Choose one shape for tensors of these strides, and which tensors must be copied to fit."""
    count = _leading(n, heads, shape)
    leading = shape[:count]
    contiguous = strides_of_packed(shape)
    copies = [not _is_readable(n, shape, own, count) for own in strides]
    most = 2 if heads else 3  # leading dimensions that may remain: B, T and H, of which heads takes H
    while True:
        left = [contiguous if copied else own for own, copied in zip(strides, copies, strict=True)]
        groups = _merged(leading, left, count - 1 if heads else count)
        if not heads and len(groups) <= 1:
            return _Arrangement((math.prod(leading), n), tuple(copies))
        if len(groups) <= most:
            extents = tuple(math.prod(leading[i] for i in group) for group in groups)
            if not heads and len(extents) == 2 and extents[1] >= SEQUENCE:
                # B and T, as of x[:, 1:]: T in the place of H would make a layout of its own for each length.
                extents = (*extents, 1)
            padded = (1,) * (most - len(extents)) + extents
            return _Arrangement((*padded, heads, n) if heads else (*padded, n), tuple(copies))
        # Copy the tensors that are least evenly spaced by themselves first: the others may then agree.
        alone = [len(_merged(leading, [own], count - 1 if heads else count)) for own in left]
        worst = max(alone)
        copies = [copied or (worst > 1 and own == worst) for copied, own in zip(copies, alone, strict=True)]


def _leading(n: int, heads: int, shape: _Sizes) -> int:
    """Count the leading dimensions: those before the last ones, which hold n elements. The last one is of heads."""
    count, elements = len(shape), 1
    while elements < n or count == len(shape):
        count -= 1
        elements *= shape[count]
    while heads > 1 and shape[count - 1] == 1:  # a normalized dimension of extent 1
        count -= 1
    return count


def _is_readable(n: int, shape: _Sizes, strides: _Sizes, count: int) -> bool:
    """Whether the elements of each row are contiguous, and no rows overlap."""
    expected = 1
    for extent, stride in zip(reversed(shape[count:]), reversed(strides[count:]), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    if n == 1 and any(stride != 1 for stride in strides[count:]):
        return False  # view would keep this stride, which must be 1
    return all(
        extent == 1 or stride >= n for extent, stride in zip(shape[:count], strides[:count], strict=True)
    )


def _merged(leading: _Sizes, strides: Sequence[_Sizes], count: int) -> list[list[int]]:
    """Group the first `count` leading dimensions, without extents of 1: the dimensions of a group are evenly spaced in
    all tensors, so that one dimension can replace them."""
    groups: list[list[int]] = []
    for dim in range(count):
        if leading[dim] == 1:
            continue
        if groups:
            last = groups[-1][-1]
            if all(own[last] == own[dim] * leading[dim] for own in strides):
                groups[-1].append(dim)
                continue
        groups.append([dim])
    return groups


def strides_of_packed(shape: _Sizes) -> _Sizes:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))
