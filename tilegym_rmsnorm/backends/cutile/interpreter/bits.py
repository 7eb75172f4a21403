# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The bits of a tile read as other numbers: of the same width, or by way of bytes, lowest byte first."""

from __future__ import annotations

import torch

from .dtypes import name, torch_dtype
from .ops import as_tile
from .tile import Tile

__all__ = ["bitcast", "pack_to_bytes", "unpack_from_bytes"]


def bitcast(x, /, dtype):
    value = as_tile(x).value
    target = torch_dtype(dtype)
    if torch.bool in (value.dtype, target) or value.dtype.itemsize != target.itemsize:
        raise TypeError(f"bitcast takes dtypes of the same width, got {name(value.dtype)} and {name(target)}")
    return Tile(value.view(target))


def pack_to_bytes(x, /):
    value = as_tile(x).value
    if value.dtype == torch.bool:
        raise TypeError("pack_to_bytes takes numbers, got bool_")
    return Tile(value.reshape(-1).contiguous().view(torch.uint8))


def unpack_from_bytes(x, /, dtype):
    value = as_tile(x).value
    target = torch_dtype(dtype)
    if target == torch.bool:
        raise TypeError("unpack_from_bytes makes numbers, got bool_")
    if value.dtype != torch.uint8 or value.ndim != 1:
        raise TypeError(
            f"unpack_from_bytes takes a 1-D tile of uint8, got {value.ndim}-D of {name(value.dtype)}"
        )
    if value.numel() % target.itemsize:
        raise TypeError(f"{value.numel()} bytes are no whole number of {name(target)}")
    return Tile(value.contiguous().view(target))
