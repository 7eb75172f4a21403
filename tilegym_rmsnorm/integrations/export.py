# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Replace the ops of an exported graph by PyTorch's operations, for runtimes that do not know the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.call import watched
from tilegym_rmsnorm.ops.norm import op  # noqa: F401 both define their ops
from tilegym_rmsnorm.ops.rope import op as rope_op  # noqa: F401 both define their ops
from tilegym_rmsnorm.routes import library_op


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Make a table of decompositions for `ExportedProgram.run_decompositions`, which keeps these ops by itself.

    `exported.run_decompositions(decompositions())` replaces these ops alone. For those of PyTorch too:

        table = torch.export.default_decompositions()
        table.update(decompositions())
        exported = exported.run_decompositions(table)

    `make_fx(step, decomposition_table=decompositions())` does so while it traces. `torch.onnx.export` needs no table.

    Returns:
        dict: For each op of `torch.ops.tilegym_rmsnorm` a function of the op's arguments, which computes its results by
            the formula of backend "torch", in PyTorch's operations, each rounded where the kernels round.
    """
    return {each: watched.translated()(function) for each, function in library_op.DECOMPOSITIONS.items()}
