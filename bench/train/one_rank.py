# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Be rank 0 of several in one process, by PyTorch's fake process group, which communicates nothing: a gather copies the
rank's own shard, a sum is the rank's own part. Losses mean nothing, but are those of this rank with every norm."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from bench.train.parallel import Meshes, meshes_of

LIBRARIES: list[torch.library.Library] = []  # what they hold ends with them


def start(fsdp: int, tp: int) -> Meshes:
    """Return the meshes of rank 0. Raises ValueError as `check` does."""
    check(fsdp * tp)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fsdp * tp)
    fill_outputs(torch.device(kind))
    return meshes_of(kind, fsdp, tp)


def check(ranks: int) -> None:
    """Raise ValueError where rank 0 of so many ranks cannot be measured alone."""
    if ranks == 1:
        raise ValueError("--one-rank: expected --fsdp or --tp beside it")
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"--one-rank: expected one process, got {world}")


def fill_outputs(device: torch.device) -> None:
    """Let the fake process group give a rank its own part of a scatter and a reduce-scatter, as that of PyTorch 2.13
    does. Before, it leaves the memory unfilled, and losses are NaN."""
    if TorchVersion(torch.__version__) >= "2.13":
        return

    def several(outputs: list[Tensor], given: list[Tensor], group: Any, *more: Any) -> Any:
        for output, whole in zip(outputs, given, strict=True):
            output.copy_(whole.view(-1)[: output.numel()].view_as(output))
        return torch.ops.c10d.broadcast_(outputs, group, 0, 0)[1]  # which does nothing

    def single(output: Tensor, given: Tensor, group: Any, *more: Any) -> tuple[Tensor, Any]:
        return output, several([output], [given], group)

    def scattered(
        outputs: list[Tensor], given: list[list[Tensor]], group: Any, *more: Any
    ) -> tuple[Any, Any]:
        return outputs, several(outputs, [parts[0] for parts in given], group)

    library = torch.library.Library("c10d", "IMPL")
    LIBRARIES.append(library)
    functions = {"_reduce_scatter_base_": single, "reduce_scatter_tensor_coalesced_": several}
    for name, function in {**functions, "scatter_": scattered}.items():
        library.impl(name, function, device.type.upper(), allow_override=True)
