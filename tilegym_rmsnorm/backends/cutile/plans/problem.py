# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What a choice of kernels is for: numbers and names."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
SAME, FLOAT32 = WEIGHTS = ("same", "float32")  # of x's dtype, or none; float32 beside x of 2 bytes
SHARED = {"float16": ("bfloat16",)}  # the same bytes, and the same float32 registers
# The ops, and by whose entries each may be served, its own first.
SERVED_BY = {"forward": ("forward",), "backward": ("backward",), "dx": ("dx", "backward")}


class Bucket(NamedTuple):
    """The problems that share a config."""

    op: str  # of SERVED_BY: "dx" is a backward without dw
    n: int
    dtype: str
    size: str  # of sizes.SIZES
    weight: str = SAME  # of WEIGHTS


class Facts(Protocol):
    """What a choice depends on of a device: whose tables serve it, and of how many blocks a team may be."""

    target: Any
    architecture: int
    most_members: int
