# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A process whose first backward adds dw to a main_grad, in a capture or with the memory of a pool.

python first_use_main_grad.py SURROUNDING FLAG BACKEND
"""

import gc
import sys

import torch
from main_grads import assert_added, exact_dw, norm_of, rows

ROWS, COLUMNS = 64, 4096
FLAGS = "no flag", "grad_added_to_main_grad"


def in_a_graph(norm, x, dy) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        norm(x).backward(dy)
    graph.replay()


def in_a_mem_pool(norm, x, dy) -> None:
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        norm(x).backward(dy)


SURROUNDINGS = {"graph": in_a_graph, "MemPool": in_a_mem_pool}


def main(surrounding: str, flag: str, backend: str) -> None:
    norm = norm_of(COLUMNS, backend=backend, flag=flag == FLAGS[1])
    x, dy = rows(ROWS, COLUMNS), rows(ROWS, COLUMNS)
    before = norm.weight.main_grad.clone()
    allocated = torch.cuda.memory_allocated()
    SURROUNDINGS[surrounding](norm, x, dy)
    norm.weight.grad = None
    gc.collect()
    left = torch.cuda.memory_allocated() - allocated
    assert left == 0, f"{left} bytes outlive the call"
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], ROWS)


if __name__ == "__main__":
    main(*sys.argv[1:])
