# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Training in parallel: what each of several processes runs. test_processes.py starts them.

python tests/distributed/parallel_training.py [CASE ...]                       2 or 4 processes on a CPU, with gloo
torchrun --nproc-per-node 2 tests/distributed/parallel_training.py [CASE ...]  2 GPUs, with NCCL

A case is a way to train in parallel and a backend of the norms: "tensor_parallel auto". It makes one step of a small
transformer, and checks that

- the loss and every gradient are as near to float64 as those of one process that has the whole batch;
- a second run gives the same bits;
- the norms communicate nothing: what is communicated is, message by message, what the same model communicates with
  `Scaling` in place of its norms. That is x * weight, element by element, for which nobody needs another's elements.
  And there are as many collectives as the case says that its way of training takes.
"""

import contextlib
import datetime
import functools
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilegym_rmsnorm import RMSNorm

HAS_GPU = "LOCAL_RANK" in os.environ  # torchrun sets it
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if HAS_GPU else torch.device("cpu")
WORLD = 2  # on a CPU as many as a case needs
BLOCKS = 2
# On a CPU small enough for the interpreter of the kernels.
BATCH, TOKENS, HEADS, D = (8, 256, 8, 128) if HAS_GPU else (8, 8, 4, 8)
E = HEADS * D
MICROBATCHES = 4 if HAS_GPU else 2
TIMEOUT = datetime.timedelta(seconds=120)  # until a process says that it waits for one that does not come

NormOf = Callable[..., nn.Module]  # as RMSNorm is made: of a size, and perhaps heads


class Scaling(nn.Module):
    """Weights of a norm's shape, a residual's sum, and nothing for which another element is needed."""

    def __init__(self, size: int, heads: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((size,) if heads is None else (heads, size)))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return x * self.weight
        x = x + residual
        return x * self.weight, x


class Scores(nn.Module):
    """Causal attention. q holds the tokens from `first` on, (B, heads, T, D)."""

    first = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns = (torch.arange(t.shape[2], device=t.device) for t in (q, k))
        mask = (rows + self.first)[:, None] >= columns
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Attention with q and k normalized in each head: q by weights of each head, k by weights that heads share."""

    def __init__(self, norm: NormOf) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(E, E, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = norm(D, heads=HEADS), norm(D)
        self.scores = Scores()

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (linear(h).unflatten(-1, (-1, D)) for linear in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        found = self.scores(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(E, 2 * E, bias=False), nn.Linear(2 * E, E, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.up(h)))


class Block(nn.Module):
    def __init__(self, norm: NormOf) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(E), Attention(norm)
        self.mlp_norm, self.mlp = norm(E), Mlp()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's branch and the residual, which the next norm adds."""
        if residual is None:
            h, residual = self.attention_norm(x), x
        else:
            h, residual = self.attention_norm(x, residual=residual)
        h, residual = self.mlp_norm(self.attention(h), residual=residual)
        return self.mlp(h), residual


class Model(nn.Module):
    """blocks: a part of all, as a stage of a pipeline has it. The last part ends with a norm."""

    def __init__(self, norm: NormOf, blocks: range = range(BLOCKS)) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block(norm) for number in blocks})
        self.norm = norm(E) if BLOCKS - 1 in blocks else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        for block in self.blocks.values():
            x, residual = block(x, residual)
        return (x, residual) if self.norm is None else self.norm(x, residual=residual)[0]


def made(norm: NormOf, blocks: range = range(BLOCKS)) -> Model:
    """Each process has the same parameters, and a stage those of the whole model."""
    model = Model(norm, blocks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator)
            # Of linear layers as small as keeps values near 1; of norms away from 1.
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else drawn / parameter.shape[1] ** 0.5)
    return model.to(DEVICE)


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    """x and what the model is to make of it, (B, T, E) in float32: rows of x differ in scale."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(BATCH, TOKENS, E, generator=generator) for _ in range(2))
    return (x * torch.linspace(0.5, 2, TOKENS)[:, None]).to(DEVICE), target.to(DEVICE)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """Compute in target's dtype."""
    return F.mse_loss(y.to(target.dtype), target)


Sent = Counter[
    tuple[str, int]
]  # how often each message: what it is, and the elements that a process gives to it


class Messages(TorchDispatchMode):
    """Messages to and from this process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or torch.compile compiles nothing inside of it

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it does this on local tensors, which come by here
        if isinstance(op, torch._ops.OpOverload):
            space, _, name = op._schema.name.partition("::")
            if space in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap", "barrier")):
                tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
                # One that gathers in place takes what it gives and, larger, room for what it gets.
                self.sent[kind_of(name), min(tensor.numel() for tensor in tensors)] += 1
        return op(*args, **(kwargs or {}))


def kind_of(name: str) -> str:
    """all_gather, of _allgather_base_ and all_gather_into_tensor."""
    flat = name.replace("_", "")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send", "recv")
    return next((kind for kind in kinds if flat.startswith(kind.replace("_", ""))), name)


@contextlib.contextmanager
def messages(has_hooks: bool = True) -> Iterator[Sent]:
    """Count messages in this block. has_hooks: CommDebugMode counts as many collectives; torch.compile and pipelines do
    not take its hooks."""
    own, theirs = Messages(), CommDebugMode()
    with own, theirs if has_hooks else contextlib.nullcontext():
        yield own.sent
    if has_hooks:
        assert theirs.get_total_counts() == own.sent.total(), (theirs.get_comm_counts(), own.sent)


class Step(NamedTuple):
    """Results of a step. gradients: by the parameter's name, of this process's parameters."""

    loss: Tensor
    gradients: dict[str, Tensor]
    sent: Sent


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by the names that the model has without torch.compile."""
    named = model.named_parameters()
    return {name.replace("_orig_mod.", ""): whole(parameter.grad).detach() for name, parameter in named}


def mean_of_processes(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value / WORLD


@functools.cache
def one_process(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients of the whole batch, with everything in this dtype, by the reference."""
    model = made(functools.partial(RMSNorm, eps=1e-6, backend="torch")).to(dtype)
    x, target = batch()
    loss = mean_square(model(x.to(dtype)), target.double() if dtype == torch.float64 else target)
    loss.backward()
    return loss.detach(), gradients_of(model)


def check(step: Step, dtype: torch.dtype) -> None:
    """Allow twice the distance from float64 of one process that computes in dtype, and 4 roundings: sums are made in
    another order, of parts. A process whose part is left out changes a gradient by about 1 / WORLD of it."""
    true_loss, truth = one_process(torch.float64)
    low_loss, low = one_process(dtype)
    assert step.gradients, "no gradient was found"
    triples = [(name, truth[name], low[name], value) for name, value in step.gradients.items()]
    for name, true, one, value in [("loss", true_loss, low_loss, step.loss), *triples]:
        assert value.shape == true.shape, (name, value.shape, true.shape)
        far, may_be = ((each.double() - true).norm() / true.norm() for each in (value, one))
        limit = 2 * may_be + 4 * torch.finfo(dtype).eps
        assert far <= limit, f"{name}: {far:.2e} of it off, expected at most {limit:.2e}"


def is_same(one: Step, other: Step) -> bool:
    pairs = [
        (one.loss, other.loss),
        *((value, other.gradients[name]) for name, value in one.gradients.items()),
    ]
    return all(torch.equal(*pair) for pair in pairs)


def by_batch(model: nn.Module, has_hooks: bool = True) -> Step:
    """Each process has its part of the batch."""
    x, target = (t.chunk(WORLD)[dist.get_rank()] for t in batch())
    with messages(has_hooks) as sent:
        loss = mean_square(model(x), target)
        loss.backward()
    return Step(mean_of_processes(loss.detach()), gradients_of(model), sent)


def shard(model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# Of each block the parameters are gathered in the forward and again in the backward, those of the last norm once.
FSDP = {"all_gather": 2 * BLOCKS + 1, "reduce_scatter": BLOCKS + 1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fully_sharded(norm: NormOf) -> Step:
    return by_batch(shard(made(norm), mp_policy=BF16))


@functools.lru_cache(maxsize=1)
def compiled_model(norm: NormOf) -> Model:
    torch._dynamo.reset()  # the limit of recompilations is one for all cases of this process
    model = made(norm)
    for name, block in model.blocks.items():
        kind = "inductor" if HAS_GPU else "aot_eager"
        model.blocks[name] = torch.compile(block, backend=kind, fullgraph=True)
    return shard(model, mp_policy=BF16)


def compiled(norm: NormOf) -> Step:
    """Each block a graph, which has no breaks. To make them takes longest: a second run is of the same graphs, and the
    stand-in, which says what is sent, has none."""
    model = shard(made(norm), mp_policy=BF16) if norm is Scaling else compiled_model(norm)
    model.zero_grad()
    return by_batch(model, has_hooks=False)


class HeadsParallel(ParallelStyle):
    """Weights of a norm with a row for each head: a process has those of its own heads."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters()):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        return distribute_module(module, mesh, place)


def parallelize(model: Model, mesh: DeviceMesh) -> Model:
    """Shard by tensor and by sequence: norms have a part of the tokens, attention and MLP a part of their columns,
    q_norm and k_norm a part of the heads."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    of_heads = (Shard(1),) * 3  # (B, heads, T, D)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "attention.q_norm": HeadsParallel(),
        "attention.k_norm": SequenceParallel(sequence_dim=2),
        "attention.scores": PrepareModuleInput(
            input_layouts=of_heads, desired_input_layouts=of_heads, use_local_output=True
        ),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp_norm": SequenceParallel(),
        "mlp": gather,
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.up"):
        plan[name] = ColwiseParallel(use_local_output=False)
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    if model.norm is not None:
        parallelize_module(model, mesh, {"norm": SequenceParallel()})
    return model


# Before attention and MLP tokens are gathered, behind them scattered; the backward does the opposite. At the end y is
# gathered for the loss.
TENSOR_PARALLEL = {"all_gather": 4 * BLOCKS + 1, "reduce_scatter": 4 * BLOCKS}


def tensor_parallel(norm: NormOf) -> Step:
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    model = parallelize(made(norm), mesh)
    x, target = batch()
    x = distribute_tensor(x, mesh, [Shard(1)])
    with messages() as sent:
        loss = mean_square(whole(model(x)), target)
        loss.backward()
    return Step(loss.detach(), gradients_of(model), sent)


def sharded_and_tensor_parallel(norm: NormOf) -> Step:
    """Two groups share the batch and the parameters; in each of them two processes share tensors and tokens."""
    mesh = init_device_mesh(DEVICE.type, (2, WORLD // 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    model = shard(parallelize(made(norm), tensor), data)
    x, target = (t.chunk(2)[data.get_local_rank()] for t in batch())
    x = distribute_tensor(x, tensor, [Shard(1)])
    with messages() as sent:
        loss = mean_square(whole(model(x)), target)
        loss.backward()
    return Step(mean_of_processes(loss.detach()), gradients_of(model), sent)


# And the gradients of norms are summed where each process has another part of the tokens or, of k_norm, of the heads.
BOTH = {kind: FSDP[kind] + TENSOR_PARALLEL[kind] for kind in FSDP} | {"all_reduce": 3 * BLOCKS + 1}


class ContextScores(Scores):
    """Scores of some tokens: all of k and v are gathered."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def gathered(self, t: Tensor) -> Tensor:
        found = DTensor.from_local(t, self.mesh, [Shard(2)]).redistribute(placements=[Replicate()])
        return found.to_local(grad_placements=[Partial()])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.first = q.shape[2] * self.mesh.get_local_rank()
        return super().forward(q, *map(self.gathered, (k, v)))


def context_parallel(norm: NormOf) -> Step:
    """Shard by hand: PyTorch's context_parallel knows no attention of CPUs. Each process has all parameters."""
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    model = made(norm)
    of_tokens = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    plan = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    plan |= {name: of_tokens for name in ("attention", "mlp")}
    for block in model.blocks.values():
        block.attention.scores = ContextScores(mesh)
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"norm": SequenceParallel()})
    x, target = (t.chunk(WORLD, dim=1)[dist.get_rank()] for t in batch())
    x = DTensor.from_local(x, mesh, [Shard(1)])
    with messages() as sent:
        loss = mean_square(model(x).to_local(), target) / WORLD
        loss.backward()
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # a norm's gradient says itself that it is a sum
            dist.all_reduce(parameter.grad)
    return Step(WORLD * mean_of_processes(loss.detach()), gradients_of(model), sent)


# k and v of each block, and their gradients.
CONTEXT_PARALLEL = {"all_gather": 2 * BLOCKS, "reduce_scatter": 2 * BLOCKS}


class Stage(PipelineStage):
    """A stage that, with torch 2.9 on gloo, omits the messages by which NCCL makes its communicators: stages send int64
    to who waits for float32, and gloo, which needs no such message, ends the process."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        is_broken = not HAS_GPU and TorchVersion(torch.__version__) < "2.10"
        return [] if is_broken else super()._get_init_p2p_neighbors_ops()


def pipelined(schedule: type, norm: NormOf) -> Step:
    """Two stages: for each microbatch a branch and a residual go from one to the other, and their gradients back. Where
    there are more processes, those of a stage share its parameters and the batch."""
    stages, each = 2, BLOCKS // 2
    mesh = init_device_mesh(DEVICE.type, (stages, WORLD // stages), mesh_dim_names=("stage", "data"))
    number, data = mesh["stage"].get_local_rank(), mesh["data"]
    model = made(norm, range(each * number, each * (number + 1)))
    if data.size() > 1:
        shard(model, data)
    x, target = (t.chunk(data.size())[data.get_local_rank()] for t in batch())
    stage = Stage(model, number, stages, DEVICE, group=mesh.get_group("stage"))
    run = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=mean_square).step
    losses: list[Tensor] = []
    with messages(has_hooks=False) as sent:
        run(*[x] * (number == 0), target=target if number == stages - 1 else None, losses=losses)
    assert sent["send", x.numel() // MICROBATCHES] == 2 * MICROBATCHES, sent
    loss = sum(losses, start=torch.zeros((), device=DEVICE)).detach() / MICROBATCHES
    return Step(stages * mean_of_processes(loss), gradients_of(model), sent)


class Case(NamedTuple):
    """step: of a model with these norms. dtype: that of the norms.

    collectives: how many of each kind the way of training takes, whatever the norms are; None: the stand-in alone says.
    """

    step: Callable[[NormOf], Step]
    dtype: torch.dtype
    collectives: dict[str, int] | None
    processes: int = 2  # at least; on a CPU as many


ON_CPUS = 2 if HAS_GPU else 4  # there the processes of a stage share its parameters, too
CASES = {
    "fully_sharded": Case(fully_sharded, torch.bfloat16, FSDP),
    "compiled": Case(compiled, torch.bfloat16, FSDP),
    "tensor_parallel": Case(tensor_parallel, torch.float32, TENSOR_PARALLEL),
    "sharded_and_tensor_parallel": Case(sharded_and_tensor_parallel, torch.float32, BOTH, 4),
    "context_parallel": Case(context_parallel, torch.float32, CONTEXT_PARALLEL),
    "pipelined_gpipe": Case(functools.partial(pipelined, ScheduleGPipe), torch.float32, None, ON_CPUS),
    "pipelined_1f1b": Case(functools.partial(pipelined, Schedule1F1B), torch.float32, None, ON_CPUS),
}
BACKENDS = ("auto", "cutile")


def run(case: Case, backend: str) -> None:
    norm = functools.partial(RMSNorm, eps=1e-6, backend=backend)
    first, second, scaled = case.step(norm), case.step(norm), case.step(Scaling)
    check(first, case.dtype)
    assert is_same(first, second), "other bits in a second run"
    assert first.sent == scaled.sent, f"norms communicate: {first.sent} in the place of {scaled.sent}"
    if case.collectives is not None:
        counts: Counter[str] = Counter()
        for (kind, _), number in first.sent.items():
            counts[kind] += number
        assert counts == case.collectives, (counts, case.collectives)


def main(rank: int, world: int, store: str, names: list[str]) -> None:
    global WORLD
    WORLD = world
    torch.set_num_threads(1)
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
        # The other ways of attention add the gradient of q in the order in which blocks end: no two runs are alike.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        dist.init_process_group("nccl", timeout=TIMEOUT)
    else:
        files = dist.FileStore(store, WORLD)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    failed = []
    for name in names:
        case, _, backend = name.partition(" ")
        if (needed := CASES[case].processes) > WORLD:
            tell(f"skipped {name}: it needs {needed} processes")
            continue
        began, is_right = time.perf_counter(), torch.ones((), device=DEVICE)
        try:
            run(CASES[case], backend)
        except AssertionError:  # behind all that is sent, so that the next case can begin
            traceback.print_exc()
            is_right.zero_()
        dist.all_reduce(is_right, dist.ReduceOp.MIN)
        if is_right.item():
            tell(f"passed {name}: {time.perf_counter() - began:.1f} s")
        else:
            failed.append(name)
    dist.destroy_process_group()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    names = sys.argv[1:] or [f"{case} {backend}" for case in CASES for backend in BACKENDS]
    if HAS_GPU:
        main(int(os.environ["RANK"]), WORLD, "", names)
    else:
        # In this process, of which the others are forked: what PyTorch compiles with takes seconds to import. No
        # backward runs here, or PyTorch would refuse those of forked processes.
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True))
        for world in (2, 4):
            some = [name for name in names if CASES[name.partition(" ")[0]].processes == world]
            with tempfile.TemporaryDirectory() as folder:
                arguments = world, os.path.join(folder, "store"), some
                torch.multiprocessing.start_processes(main, arguments, nprocs=world, start_method="fork")
