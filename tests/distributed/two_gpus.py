# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Cases for two processes, each with a GPU, and NCCL between them; test_gpu_distributed.py starts them.

torchrun --nproc-per-node 2 tests/distributed/two_gpus.py CASE
"""

import faulthandler
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from beside_communication import Communication, overlap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from variants import VARIANTS, Variant, check, check_all, make, options, run

from tilegym_rmsnorm import RMSNorm, override_aten, rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends.registry import is_backend_available
from tilegym_rmsnorm.settings import AUTO_ORDER

N = 4096
RANK = int(os.environ.get("RANK", 0))
DEVICE = torch.device("cuda", RANK)


class Gather(torch.autograd.Function):
    """A gather by hand, as in tensor parallelism: the gradient may be on its way when the norm's backward begins."""

    @staticmethod
    def forward(ctx, y):
        return collectives.all_gather_tensor(y, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, dy):
        scattered = collectives.reduce_scatter_tensor(dy, "sum", 0, dist.group.WORLD)
        assert isinstance(scattered, collectives.AsyncCollectiveTensor)
        return scattered


def gradient_of_a_collective() -> None:
    x, weight = torch.randn(512, N, device=DEVICE), torch.rand(N, device=DEVICE) + 0.5

    def gradients(norm):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = Gather.apply(norm(leaves[0], (N,), leaves[1], 1e-6))
        # Another factor for each row; small ones, or the rounding of dw's sum alone would show.
        (y.sin() * torch.linspace(0, 1, len(y), device=DEVICE)[:, None]).sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(F.rms_norm)
    for backend in ("auto", *filter(is_backend_available, AUTO_ORDER)):
        got = gradients(lambda *arguments, backend=backend: rms_norm(*arguments, backend=backend))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def input_of_a_collective() -> None:
    gathered = collectives.all_gather_tensor(torch.randn(512, N, device=DEVICE), 0, dist.group.WORLD)
    for backend in ("auto", *filter(is_backend_available, AUTO_ORDER)):
        y = rms_norm(gathered, (N,), None, 1e-6, backend=backend)
        torch.testing.assert_close(y, F.rms_norm(gathered.wait(), (N,), None, 1e-6), rtol=1e-4, atol=1e-4)


def sequence_parallel() -> None:
    """Compare the number of collectives, and dw's placements, with PyTorch's own norm."""
    mesh = init_device_mesh("cuda", (2,))

    def step(norm, batch):
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(norm(N)).to(DEVICE), torch.randn(batch, 64, N, device=DEVICE)
        parallelize_module(model, mesh, {"0": SequenceParallel()})
        with CommDebugMode() as communication:
            y = model(distribute_tensor(x, mesh, [Shard(1)]))
            y.sum().backward()
        dw = model[0].weight.grad
        return (communication.get_total_counts(), y.placements, dw.placements), (
            y.full_tensor(),
            dw.full_tensor(),
        )

    for batch in (1, 2):
        (ours, values), (theirs, expected) = step(RMSNorm, batch), step(torch.nn.RMSNorm, batch)
        assert ours == theirs, (ours, theirs)
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other)


def fully_sharded() -> None:
    """FSDP2 with bfloat16 parameters: the losses of a few steps, of our module, and of PyTorch's on our kernels."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def losses(norm):
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(1024, 1024), norm(1024), torch.nn.GELU()) for _ in range(3)
        ]
        model = torch.nn.Sequential(*blocks).to(DEVICE)
        for part in (*blocks, model):
            fully_shard(part, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(RANK)
        for _ in range(8):
            loss = (
                (model(torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)).float() - 1)
                .square()
                .mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    expected = list(losses(torch.nn.RMSNorm))
    with override_aten() as override:
        overridden = list(losses(torch.nn.RMSNorm))
    for counts in override.stats.values():
        assert counts == {"taken": 8 * 3}, override.stats
    for found in (list(losses(RMSNorm)), overridden):
        for one, other in zip(found, expected, strict=True):
            assert abs(one - other) < 0.02 * other


SECONDS = float(os.environ.get("SECONDS_BESIDE_NCCL", 20))
PATIENCE = 240  # more seconds, until a process that hangs says where, and ends
WAITING = {
    "bfloat16": Variant(torch.bfloat16, (2048, 32768), weight_dtype=torch.bfloat16),
    "float32": Variant(torch.float32, (1024, 32768)),
    "wider": Variant(torch.bfloat16, (1024, 65536), weight_dtype=torch.bfloat16),
}


def waiting_beside_nccl() -> None:
    """Kernels whose blocks wait for each other, forward and backward, beside all_reduce on another stream: in both are
    blocks that keep their SM until others have come. All results have the bits of the first, which is right."""
    faulthandler.dump_traceback_later(PATIENCE + SECONDS, exit=True)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilegym_rmsnorm").addHandler(handler)
    logging.getLogger("tilegym_rmsnorm").setLevel("DEBUG")
    inputs = {name: make(variant, seed=RANK, device=DEVICE) for name, variant in WAITING.items()}
    first = {}
    for name, variant in WAITING.items():
        first[name] = run(variant, inputs[name], "cutile")
        check_all(variant, inputs[name], dict(first[name]))
        first[name] = {key: value for key, value in first[name].items() if value is not None}
    served = [line for line in said if line.startswith(("forward of", "backward of"))]
    assert len(served) >= 2 * len(WAITING) and all("team" in line for line in served), served
    torch.cuda.empty_cache()  # of what was computed in float64

    communication = Communication(DEVICE)
    communication.start(2)  # NCCL connects, and loads its kernels
    torch.cuda.synchronize()
    dist.barrier()
    calls, together, begun = 0, 0.0, time.perf_counter()
    while True:
        base, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        base.record()
        communication.stream.wait_event(base)
        with communication.inside():
            communication.begin.record()
        communication.start(8)
        begin.record()
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(8):
            for name, variant in WAITING.items():
                found = run(variant, inputs[name], "cutile")
                differ += sum((found[key] != value).any() for key, value in first[name].items())
                communication.start(4)
                calls += 1
        end.record()
        with communication.inside():
            communication.end.record()
        torch.cuda.synchronize()
        communication.check()
        together += overlap(base, communication, begin, end)
        assert differ.item() == 0, f"{differ.item()} results of a round have other bits beside NCCL"
        # Both go on, or none: the next round's all_reduce needs both.
        is_over = torch.tensor(float(time.perf_counter() - begun > SECONDS), device=DEVICE)
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if is_over.item():
            break
    assert together > 0.0, "NCCL and these kernels never ran together"
    print(
        f"{calls} forwards and backwards, {together / 1e3:.1f} s of {time.perf_counter() - begun:.1f} s beside NCCL"
    )


def another_device() -> None:
    """tests/gpu/test_gpu.py has the plain call. Here are those of other kinds, ops, and backwards in this thread, where
    another device is the current one: autograd's thread makes that of the tensors the current one."""
    other = torch.device("cuda", 1 - RANK)
    chosen = ("bias", "residual and bias", "heads in place, residual", "weights of heads, llama")
    for backend in ("auto", *filter(is_backend_available, AUTO_ORDER)):
        for name in chosen:
            variant = VARIANTS[name]
            inputs = make(variant, device=other)
            check_all(variant, inputs, run(variant, inputs, backend))
            assert torch.cuda.current_device() == RANK, name
        _passes_on(other, backend)
        _ops_on(other, backend)


ROWS = Variant(torch.bfloat16, (515, 1024), residual_dtype=torch.bfloat16, bias_dtype=torch.float32)


def _passes_on(other: torch.device, backend: str) -> None:
    inputs = make(ROWS, device=other)
    x, weight = inputs.x, inputs.weight
    y, residual_out, rstd = rms_norm_forward(x, weight, ROWS.eps, **options(ROWS, inputs), backend=backend)
    more = {"d_residual_out": inputs.d_residual_out, "needs_db": True}
    dx, dw, db = rms_norm_backward(residual_out, inputs.dy, weight, rstd, **more, backend=backend)
    assert torch.cuda.current_device() == RANK
    check(ROWS, inputs, residual_out, y=y, rstd=rstd, dx=dx, dw=dw, db=db)


def _ops_on(other: torch.device, backend: str) -> None:
    """The op with a residual by autograd, as torch.compile calls it and by itself, and then its backward's op here."""
    inputs, ops = make(ROWS, device=other), torch.ops.tilegym_rmsnorm
    numbers = 1, ROWS.eps, ROWS.offset, ROWS.casting, ROWS.alpha
    leaves = [
        each.detach().requires_grad_() for each in (inputs.x, inputs.residual, inputs.weight, inputs.bias)
    ]

    def op(*leaves):
        return ops.rms_norm_forward(*leaves, *numbers, None, None, backend)

    for each in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        y, rstd, residual_out = each(*leaves)
        gradients = torch.autograd.grad((y, residual_out), leaves, (inputs.dy, inputs.d_residual_out))
        assert torch.cuda.current_device() == RANK
        found = dict(zip(("dx", "d_residual", "dw", "db"), gradients, strict=True))
        check(ROWS, inputs, residual_out.detach(), y=y.detach(), rstd=rstd.detach().flatten(), **found)
    given = inputs.dy, residual_out.detach(), inputs.weight, rstd.detach(), inputs.d_residual_out
    dtypes = ROWS.dtype, None, ROWS.weight_dtype, ROWS.bias_dtype
    wanted = 1 + 2 + 4  # dx, dw, db
    more = 1, ROWS.offset, ROWS.casting, ROWS.alpha
    dx, dw, db, _ = ops.rms_norm_backward(*given, wanted, *more, *dtypes, backend)
    assert torch.cuda.current_device() == RANK
    check(ROWS, inputs, residual_out.detach(), dx=dx, dw=dw, db=db)


CASES = {
    case.__name__: case
    for case in (
        gradient_of_a_collective,
        input_of_a_collective,
        sequence_parallel,
        fully_sharded,
        waiting_beside_nccl,
        another_device,
    )
}

if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    CASES[sys.argv[1]]()
    torch.cuda.synchronize()
    dist.destroy_process_group()
