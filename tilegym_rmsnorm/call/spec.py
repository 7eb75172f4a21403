# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the records of a checked call of any op.

Each op has a Spec and a Wanted of its own (ops/norm/spec.py), with the same methods: by them the registry and the
routes ask about a call without knowing its op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Casting = Literal["once", "llama"]  # see `rms_norm`
Maybe = Tensor | None


# Properties of a call's tensors by which a backend is chosen: the dtypes of the first rows, of their weight and of all
# others; the tensors whose rows kernels read, the first of them never None; and names for logs, see `parts_of`.
Facts = tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]


class Call(NamedTuple):
    """A checked call without its tensors, so that known_calls.py can keep it."""

    spec: Any  # an op's Spec
    backend: str | None  # as the caller gave it: a name, "auto", or None for the backend in effect
    # Functions of the backend (backends/contract.py); None where the call does not need one.
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    dtype: torch.dtype | None = None  # of what a recorded forward normalized: x, or residual_out


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


class Checked(NamedTuple):
    """Checked arguments. tensors: in the order of a backend. are_plain: every tensor is plain (tensors.py)."""

    names: tuple[str, ...]  # of the tensors, for error texts
    tensors: tuple[Any, ...]
    shape: torch.Size  # of the normalized dimensions
    spec: Any  # an op's Spec
    are_plain: bool
