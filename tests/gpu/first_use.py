# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A process whose first use of the package takes its memory from a pool: in a capture, or in a MemPool.

    python first_use.py SURROUNDING VARIANT COLUMNS BACKEND

Allocations that outlive the call may not come from that pool: CUDA graphs of torch.compile refuse to run then, and
other pools can never be given back.
"""

import gc
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from helpers import BF16
from variants import Variant, VariantInputs, check_all, make, run

from tilegym_rmsnorm import rms_norm

VARIANTS = {
    "plain": Variant(BF16),
    "without a weight": Variant(BF16, weight="none"),
    "bias": Variant(BF16, bias_dtype=BF16),
    "residual": Variant(BF16, residual_dtype=BF16),
    "residual without a weight": Variant(BF16, weight="none", residual_dtype=BF16, alpha=0.5),
    "heads": Variant(BF16, size=(2, 8, 4, 0), layout="heads"),
    "weights of heads": Variant(BF16, weight="heads", size=(2, 8, 4, 0), layout="heads"),
    "copied first": Variant(BF16, residual_dtype=BF16, layout="transposed"),
}


def in_reduce_overhead(variant: Variant, inputs: VariantInputs, backend: str) -> None:
    compiled = torch.compile(rms_norm, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # the first is run as it is, the second captured, the others replayed
        torch.compiler.cudagraph_mark_step_begin()
        results = run(variant, inputs, backend, compiled)
        check_all(variant, inputs, {k: None if v is None else v.clone() for k, v in results.items()})


def in_a_graph(
    variant: Variant, inputs: VariantInputs, backend: str, function: Callable[..., Any] = rms_norm
) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        results = run(variant, inputs, backend, function)
    for each in results.values():
        if each is not None:
            each.detach().fill_(math.nan)
    graph.replay()
    check_all(variant, inputs, results)


def by_the_op(
    x,
    n,
    weight,
    eps,
    *,
    offset,
    casting,
    bias,
    residual=None,
    residual_alpha=1.0,
    residual_dtype=None,
    backend,
):
    """Call the library op by itself, as a graph that is replayed does."""
    numbers = 1, eps, offset, casting, residual_alpha, residual_dtype, None, backend
    y, _, residual_out = torch.ops.tilegym_rmsnorm.rms_norm_forward(x, residual, weight, bias, *numbers)
    return y if residual is None else (y, residual_out)


def op_in_a_graph(variant: Variant, inputs: VariantInputs, backend: str) -> None:
    in_a_graph(variant, inputs, backend, by_the_op)


def in_a_mem_pool(variant: Variant, inputs: VariantInputs, backend: str) -> None:
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        results = run(variant, inputs, backend)
    check_all(variant, inputs, results)


SURROUNDINGS = {
    "reduce-overhead": in_reduce_overhead,
    "graph": in_a_graph,
    "op in a graph": op_in_a_graph,
    "MemPool": in_a_mem_pool,
}


def main(surrounding: str, name: str, columns: str, backend: str) -> None:
    variant = VARIANTS[name]
    # Rows that are not aligned have kernels of their own only where there are many.
    rows = 64 if int(columns) % 8 == 0 else 1100
    size = (*variant.size[:-1], int(columns)) if len(variant.size) == 4 else (rows, int(columns))
    variant = variant._replace(size=size)
    inputs = make(variant)
    before = torch.cuda.memory_allocated()
    SURROUNDINGS[surrounding](variant, inputs, backend)
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    assert surrounding == "reduce-overhead" or left == 0, f"{left} bytes outlive the call"


if __name__ == "__main__":
    main(*sys.argv[1:])
