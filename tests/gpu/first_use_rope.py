# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A process whose first use of qk_norm_rope is in a capture, in a graph of torch.compile, or in a pool of memory.

python first_use_rope.py SURROUNDING FORM BACKEND
"""

import functools
import gc
import math
import sys

import rope_calls
import torch
from helpers import DEVICE

from tilegym_rmsnorm import qk_norm_rope

# Options of the call
FORMS = {
    "plain": {},
    "rounded norm, positions of 32 bits": {"rope_rounding": "norm", "position_ids": torch.int32},
    "copied first": {},  # q and k, since their last stride is not 1
}


def passes(leaves, tables, gradients, options, function=qk_norm_rope):
    outputs = function(*leaves, *tables, eps=rope_calls.EPS, **options)
    return (*outputs, *torch.autograd.grad(outputs, leaves, gradients))


def in_a_graph(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        results = run()
    for each in results:
        each.detach().fill_(math.nan)
    graph.replay()
    return results


def in_a_mem_pool(run):
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        return run()


def in_reduce_overhead(run):
    compiled = torch.compile(qk_norm_rope, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # the first is run as it is, the second captured, the others replayed
        torch.compiler.cudagraph_mark_step_begin()
        results = [each.clone() for each in run(function=compiled)]
    return results


SURROUNDINGS = {"graph": in_a_graph, "MemPool": in_a_mem_pool, "reduce-overhead": in_reduce_overhead}


def main(surrounding: str, form: str, backend: str) -> None:
    options, tables = dict(FORMS[form]), "T"
    if "position_ids" in options:
        tables = "positions"
        options["position_ids"] = torch.randint(303, (2, 300), device=DEVICE, dtype=options["position_ids"])
    tensors = rope_calls.case(t=300, hq=8, d=128, dtype=torch.bfloat16, tables=tables)
    if form == "copied first":
        tensors = *(each.mT.contiguous().mT for each in tensors[:2]), *tensors[2:]
    leaves, gradients = (
        [each.requires_grad_() for each in tensors[:4]],
        [torch.randn_like(t) for t in tensors[:2]],
    )
    before = torch.cuda.memory_allocated()
    given = options | {"backend": backend}
    results = SURROUNDINGS[surrounding](functools.partial(passes, leaves, tensors[4:], gradients, given))
    # on the CPU: a matrix product of a GPU leaves the workspace of its library behind
    options = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    tables, narrow = [each.cpu() for each in tensors[4:]], [each.detach().cpu() for each in leaves]
    for one, other in zip(results, rope_calls.expected(*narrow, *tables, **options), strict=False):
        assert (one.cpu() == other.to(one.dtype)).double().mean() > 0.98  # another rstd turns roundings over
    wide = [each.double().requires_grad_() for each in narrow]
    outputs = rope_calls.expected(*wide, *tables, **options)
    want = (*outputs, *torch.autograd.grad(outputs, wide, [each.cpu().double() for each in gradients]))
    for one, other in zip(results, want, strict=True):
        assert (one.cpu().double() - other).norm() <= 1e-2 * other.norm()
    del results, one
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    assert surrounding == "reduce-overhead" or left == 0, f"{left} bytes outlive the call"


if __name__ == "__main__":
    main(*sys.argv[1:])
