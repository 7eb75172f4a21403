# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backwards with an SM margin beside all_reduce: what each of two processes runs, started by
test_processes.py.

python tests/distributed/beside_communication.py CASE STORE

On two GPUs with NCCL; without them on CPUs with gloo and kernels in the interpreter, where calls follow one another.
"""

import contextlib
import datetime
import faulthandler
import logging
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from helpers import BF16, FP32
from variants import Variant, check_all, make, options

import tilegym_rmsnorm as tr

HAS_GPU = torch.cuda.is_available()
LONGEST = 120  # seconds until a process that hangs says where, and ends
ROUNDS = 8 if HAS_GPU else 2
BACKWARDS = 24 if HAS_GPU else 1  # of a round, and a communication beside each: some milliseconds of each
WORDS = 2**24 if HAS_GPU else 2**10  # of float32 in what is communicated
EARLY = 3  # communications that are queued before the first backward


class Case(NamedTuple):
    variant: Variant
    margin: int
    kernel: str  # what the name of the backward's kernel has


def on(gpu: tuple[int, ...], cpu: tuple[int, ...]) -> tuple[int, ...]:
    return gpu if HAS_GPU else cpu


ROWS = Variant(BF16, on((16384, 4096), (1100, 40)), weight_dtype=BF16)
# The interpreter's GPU has three SMs: with a margin it has no teams.
CASES = {
    "walks": Case(ROWS, 16 if HAS_GPU else 1, "backward_rows" if HAS_GPU else "backward_tiles"),
    "walks with a residual": Case(
        ROWS._replace(residual_dtype=BF16, bias_dtype=FP32),
        16 if HAS_GPU else 1,
        "backward_rows" if HAS_GPU else "backward_",
    ),
    "teams": Case(
        Variant(BF16 if HAS_GPU else FP32, on((2048, 32768), (2, 20480)), weight_dtype=BF16),
        16 if HAS_GPU else 0,
        "team",
    ),
}


def steps_of(case: Case, device: torch.device) -> tuple[Callable[[], list], Callable[[list], None]]:
    """A backward that can be run again and again, and what checks its gradients against float64."""
    variant = case.variant
    inputs = make(variant, seed=dist.get_rank(), device=device)
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs[:4]]
    x, weight, bias, residual = leaves
    given = options(variant, inputs._replace(bias=bias, residual=residual))
    found = tr.rms_norm(x, variant.n, weight, variant.eps, **given, backend="cutile")
    results = found if variant.has_residual else (found,)
    gradients = (inputs.dy, inputs.d_residual_out)[: len(results)]
    needed = [leaf for leaf in leaves if leaf is not None]

    def backward() -> list:
        return list(torch.autograd.grad(results, needed, gradients, retain_graph=True))

    def check(gradients: list) -> None:
        rest = iter(gradients)
        named = zip(("dx", "dw", "db", "d_residual"), leaves, strict=True)
        found = {name: None if leaf is None else next(rest) for name, leaf in named}
        residual_out = results[1] if variant.has_residual else None
        check_all(variant, inputs, {"residual_out": residual_out, **found})

    return backward, check


class Communication:
    """all_reduce on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(WORDS, device=device)
        self.stream = torch.cuda.Stream() if HAS_GPU else None
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) if HAS_GPU else None for _ in range(2))

    def inside(self) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self.stream) if HAS_GPU else contextlib.nullcontext()

    def start(self, count: int) -> None:
        """Queues so many. The last is checked by `check`."""
        with self.inside():
            for _ in range(count):
                self.buffer.fill_(dist.get_rank() + 1.0)
                dist.all_reduce(self.buffer)

    def check(self) -> None:
        assert (self.buffer == 3.0).all(), "all_reduce: a wrong sum"


def overlap(base, communication: Communication, begin, end) -> float:
    """Milliseconds in which both ran."""
    since = base.elapsed_time
    return min(since(communication.end), since(end)) - max(since(communication.begin), since(begin))


def run(case: Case, device: torch.device) -> None:
    backward, check = steps_of(case, device)
    communication = Communication(device)
    alone = backward()
    check(alone)
    assert all(map(torch.equal, backward(), alone)), "alone: other bits in a second run"
    communication.start(2)  # NCCL connects, and loads its kernels
    if HAS_GPU:
        torch.cuda.synchronize()
    dist.barrier()
    most = 0.0
    for _ in range(ROUNDS):
        if HAS_GPU:
            base, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            base.record()
            communication.stream.wait_event(base)
            with communication.inside():
                communication.begin.record()
        communication.start(EARLY)
        if HAS_GPU:
            begin.record()
        beside = []
        for number in range(BACKWARDS):
            beside.append(backward()) if number < 4 or number == BACKWARDS - 1 else backward()
            communication.start(1)
        if HAS_GPU:
            end.record()
            with communication.inside():
                communication.end.record()
            torch.cuda.synchronize()
            most = max(most, overlap(base, communication, begin, end))
        communication.check()
        for gradients in beside:
            assert all(map(torch.equal, gradients, alone)), "other bits beside communication"
    assert not HAS_GPU or most > 0.0, f"communication and backward never ran together ({most} ms)"
    print(f"{most:.2f} ms of a round together", flush=True)


def main(rank: int, name: str, path: str) -> None:
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    device = torch.device("cuda", rank) if HAS_GPU else torch.device("cpu")
    if HAS_GPU:
        torch.cuda.set_device(device)
    store, timeout = dist.FileStore(path, 2), datetime.timedelta(seconds=60)
    kind = "nccl" if HAS_GPU else "gloo"
    dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=timeout)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilegym_rmsnorm").addHandler(handler)
    logging.getLogger("tilegym_rmsnorm").setLevel("DEBUG")
    case = CASES[name]
    with tr.use_sm_margin(case.margin):
        run(case, device)
    served = [line for line in said if line.startswith("backward of")]
    assert served and all(case.kernel in line for line in served), served
    dist.destroy_process_group()
    print("passed", flush=True)


if __name__ == "__main__":
    # Forked, so that torch is imported once; CUDA cannot be.
    method = "spawn" if HAS_GPU else "fork"
    torch.multiprocessing.start_processes(main, tuple(sys.argv[1:]), nprocs=2, start_method=method)
