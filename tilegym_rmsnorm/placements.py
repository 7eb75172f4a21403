# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What is a DTensor, and where its elements are, asked without importing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor: by the name of its class, which takes a second to import. Dynamo knows names."""
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, Tensor)


def splits_rows(tensor: Any, dims: int) -> bool:
    """Whether `tensor`, a DTensor or its description, is sharded in its last `dims` dimensions: several processes have
    parts of a row."""
    for placement in getattr(tensor, "placements", ()):
        # By `dim`, which every kind of shard has: is_shard() says no to some.
        dim = getattr(placement, "dim", None)
        if dim is not None and dim % tensor.ndim >= tensor.ndim - dims:
            return True
    return False


def has_too_many_shards(tensor: Any) -> bool:
    """Whether `tensor`, a DTensor, is sharded in a dimension with fewer elements than shards. A dimension may be
    sharded on several dimensions of a mesh."""
    shards: dict[int, int] = {}
    for i, placement in enumerate(getattr(tensor, "placements", ())):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shards[dim] = shards.get(dim, 1) * tensor.device_mesh.size(i)
    if is_dynamo_compiling():  # a size may be a number that is not known while it traces: it may be small
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return any(guard_or_true(tensor.shape[dim] < count) for dim, count in shards.items())
    return any(tensor.shape[dim] < count for dim, count in shards.items())
