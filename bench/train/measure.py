# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Train one model by several ways to compute its norms, which take turns."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from bench.measure.session import describe
from bench.train import kernels, parallel, traced
from bench.train.models import Sizes
from bench.train.norms import Way, loss_of
from bench.train.optimizer import MasterAdamW
from bench.train.parallel import local
from bench.train.ratios import LEAST_PAIRS, ratio_of
from bench.train.text import batches

SEED, OTHER_SEED, VALIDATION_SEED = 0, 1, 2
WARMUP_STEPS = 3
TURN_SECONDS = 0.25  # of the steps of one turn
MOST_PAIRS = 60
HALF_WIDTH = 0.01
PROFILED_STEPS = 2
SAME_STEPS = 4  # of the two runs that are compared bit by bit
SAME_LAYERS = 2
VALIDATION_BATCHES = 8
META = torch.device("meta")


@dataclass(frozen=True)
class Plan:
    """Say what is measured: the model's sizes, whether it is compiled, its meshes, and the steps of a loss curve."""

    sizes: Sizes
    compiled: bool
    steps: int
    device: torch.device
    meshes: parallel.Meshes | None = None
    keeps_start: bool = True  # the first parameters; without them only the first steps train from the start
    seconds: float = 60.0  # of turns, unless the half widths are small before
    one_rank: bool = False  # the first rank of the meshes, alone

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


class Trainee:
    """A model with its norms, its optimizer, and one step of it."""

    def __init__(self, way: Way, plan: Plan, text: Tensor, state: Trainee | None):
        """state: shares its parameters and optimizer; None: has its own."""
        self.way, self.plan, self.text = way, plan, text
        torch.manual_seed(SEED)
        self.model = way.build(plan.sizes, plan.device)
        unsharded = None
        if plan.meshes is None:
            # Not model.bfloat16(), which rounds the tables of RoPE too.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.bfloat16()
        else:
            if way.change is not None:
                unsharded = parallel.without_fsdp(way.build(plan.sizes, META), self.model, plan.meshes)
            parallel.spread(self.model, plan.meshes, plan.compiled)
        self.model.train()
        if state is not None:
            share(self.model, state.model)
            self.parameters, self.start, self.optimizer = state.parameters, state.start, state.optimizer
        else:
            self.parameters = list(self.model.parameters())
            self.start = [each.detach().clone() for each in self.parameters] if plan.keeps_start else []
            self.optimizer = MasterAdamW(self.parameters, plan.steps)
        self.loss = loss_of(self.model)
        if way.change is not None:
            tokens, fsdp = next(self.batches(SEED)), plan.meshes and plan.meshes.fsdp
            self.loss = traced.step_of(self.model, loss_of, tokens, way.change, fsdp, unsharded)
        elif plan.compiled and plan.meshes is None:
            self.loss = torch.compile(self.loss)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches of this rank: the ranks of one tensor-parallel group have the same."""
        if self.plan.meshes is not None:
            seed += 1000 * self.plan.meshes.fsdp.get_local_rank()
        return batches(self.text, self.plan.sizes.batch, self.plan.sizes.length, seed)

    def gradients(self, tokens: Tensor) -> Tensor:
        """Run forward and backward, and return the loss."""
        loss = self.loss(tokens)
        if self.way.change is None:
            loss.backward()
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.gradients(tokens)
        self.optimizer.step()
        return loss

    def restart(self) -> None:
        """Set parameters and optimizer to what they were at first."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.start, strict=True):
                parameter.copy_(start)  # DTensors have no _foreach_copy_
        self.optimizer.restart()


def share(model: nn.Module, other: nn.Module) -> None:
    """Give a model another's parameters."""
    names = dict(other.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name in [name for name, each in module._parameters.items() if each is not None]:
            module._parameters[name] = names[f"{path}.{name}".lstrip(".")]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)  # cuDNN's attention ignores it with warn_only
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def measure(
    ways: dict[str, Way], plan: Plan, texts: tuple[Tensor, Tensor], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure all ways, and return a record of each; those that fail have an `error` in the place of figures."""
    records: dict[str, dict[str, Any]] = {name: {"norm": name, "error": None} for name in ways}
    trainees: dict[str, Trainee] = {}

    def leave_out(name: str, error: Exception) -> None:
        if plan.meshes is not None and not plan.one_rank:  # the other ranks would wait for this one
            raise error
        records[name]["error"] = describe(error)
        trainees.pop(name, None)
        tell(f"failed: {name}: {records[name]['error']}")

    def each_of(phase: str, run: Callable[[Trainee], dict[str, Any]]) -> None:
        for name in list(trainees):
            try:
                with trainees[name].way.around():
                    records[name] |= run(trainees[name])
            except Exception as error:
                leave_out(name, error)
            tell(f"{phase}: {name}")

    state = None
    for name, way in ways.items():
        try:
            with way.around():
                trainees[name] = made = Trainee(
                    way, plan, texts[0], None if plan.meshes is not None else state
                )
                state = state or made
                records[name] |= first_step(made)
        except Exception as error:
            leave_out(name, error)
        tell(f"first step: {name}: {records[name].get('first_step_s')} s")
    seconds: dict[str, list[float]] = {}
    while trainees and not seconds:
        try:
            seconds = take_turns(trainees, plan, tell)
        except TurnError as failed:  # the others begin anew without it
            leave_out(failed.name, failed.error)
    for name, times in seconds.items():
        records[name] |= {"step_s": [round(each, 6) for each in times]}
    each_of("memory", peak_memory)
    if plan.is_cuda:
        each_of("kernels", profile)
    if plan.keeps_start:
        base = next(iter(trainees.values()), None)
        each_of("loss", lambda one: loss_curves(one, texts[1], one is base))
    each_of("bits", same_bits)
    return list(records.values())


def first_step(trainee: Trainee) -> dict[str, Any]:
    """Take the first steps: seconds of the first one, and what Dynamo counted meanwhile."""
    before = dynamo_counts()
    source = trainee.batches(SEED)
    started = time.perf_counter()
    losses = [trainee.step(next(source))]
    trainee.plan.synchronize()
    found: dict[str, Any] = {"first_step_s": round(time.perf_counter() - started, 2)}
    more = WARMUP_STEPS if trainee.plan.keeps_start else trainee.plan.steps - 1
    losses += [trainee.step(next(source)) for _ in range(more)]
    if not trainee.plan.keeps_start:
        found["losses"] = whole(losses, trainee.plan)
    if trainee.plan.compiled:
        counted = zip(dynamo_counts(), before, strict=True)
        found["graphs"], found["graph_breaks"] = (after - first for after, first in counted)
    return found


def dynamo_counts() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


class TurnError(Exception):
    """The error of one trainee in a turn."""

    def __init__(self, name: str, error: Exception):
        super().__init__(name)
        self.name, self.error = name, error


def take_turns(
    trainees: dict[str, Trainee], plan: Plan, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of a step, turn by turn: every trainee has as many turns, forwards and backwards in order.

    Turns end when the half width of every ratio to the first trainee is at most HALF_WIDTH, or time is up. Raises
    TurnError where a step fails.
    """
    found: dict[str, list[float]] = {name: [] for name in trainees}
    sources = {name: trainee.batches(OTHER_SEED) for name, trainee in trainees.items()}

    def turn(name: str, steps: int) -> float:
        trainee = trainees[name]
        try:
            with trainee.way.around():
                plan.synchronize()
                started = time.perf_counter()
                for _ in range(steps):
                    trainee.step(next(sources[name]))
                plan.synchronize()
                return (time.perf_counter() - started) / steps
        except Exception as error:
            raise TurnError(name, error) from error

    order = list(trainees)
    single = statistics.median(turn(order[0], 1) for _ in range(3))
    steps = agreed(max(1, round(TURN_SECONDS / single)) if plan.is_cuda else 1, plan)
    began, base = time.perf_counter(), order[0]
    gc.collect()
    gc.disable()  # a collection would fall into somebody's turn
    try:
        while True:
            for name in order:
                found[name].append(turn(name, steps))
            order.reverse()
            pairs = len(found[base])
            if pairs < LEAST_PAIRS:
                continue
            widest = max(ratio_of(found[base], times).half_width for times in found.values())
            is_late = time.perf_counter() - began > plan.seconds or pairs >= MOST_PAIRS
            if agreed(int(widest <= HALF_WIDTH or is_late or not plan.is_cuda), plan):
                tell(f"{pairs} pairs of {steps} steps each; the widest half width is {widest:.2%}")
                return found
    finally:
        gc.enable()


def agreed(value: int, plan: Plan) -> int:
    """Return the first rank's value on all ranks."""
    if plan.meshes is None:
        return value
    shared = torch.tensor(value, device=plan.device)
    dist.broadcast(shared, 0)
    return int(shared)


def on_all_ranks(value: bool, plan: Plan) -> bool:
    """Return whether the value is true on every rank."""
    shared = torch.tensor(int(value), device=plan.device)
    if plan.meshes is not None:
        dist.all_reduce(shared, dist.ReduceOp.MIN)
    return bool(shared)


def peak_memory(trainee: Trainee) -> dict[str, Any]:
    """Take one step, and return the most memory that it has, without what others keep meanwhile."""
    if not trainee.plan.is_cuda:
        return {"peak_bytes": None}
    tokens = next(trainee.batches(SEED))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainee.step(tokens)
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before + kept_bytes(trainee)}


def kept_bytes(trainee: Trainee) -> int:
    """Sum the bytes of this rank's parameters, of their masters, and of the optimizer's state."""
    kept = {id(each): each for each in (*trainee.parameters, *trainee.optimizer.masters)}
    states = trainee.optimizer.adamw.state.values()
    kept |= {id(each): each for of_one in states for each in of_one.values() if isinstance(each, Tensor)}
    return sum(local(each).nbytes for each in kept.values())


def profile(trainee: Trainee) -> dict[str, Any]:
    """Sum the device's time of forward and backward by kind of kernel, and time the optimizer."""
    source = trainee.batches(SEED)
    batches = [next(source) for _ in range(PROFILED_STEPS)]

    def run() -> None:
        for tokens in batches:
            trainee.optimizer.adamw.zero_grad()
            for parameter in trainee.parameters:
                parameter.grad = None
            trainee.gradients(tokens)

    found = kernels.by_kind(together(run, trainee.plan), kernels.our_names(), PROFILED_STEPS)
    times = []
    for tokens in batches + batches[:1]:
        trainee.gradients(tokens)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        trainee.optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return found | {"optimizer_ms": round(statistics.median(times), 3)}


def together(run: Callable[[], Any], plan: Plan) -> list[kernels.Kernel]:
    """Profile what all ranks run at the same time.

    No rank may enter the profile before the others: it would communicate for as long as it waits. The first profile
    takes long to begin, and not equally long on each rank.
    """
    kernels.profiled(run)
    if plan.meshes is not None:
        dist.barrier()
    return kernels.profiled(run)


def loss_curves(trainee: Trainee, validation: Tensor, is_base: bool) -> dict[str, Any]:
    """Train from the start; the first one from another seed too, whose distance is the noise in which curves must
    stay."""
    found: dict[str, Any] = {}
    for seed in (OTHER_SEED, SEED) if is_base else (SEED,):
        trainee.restart()
        source = trainee.batches(seed)
        losses = [trainee.step(next(source)) for _ in range(trainee.plan.steps)]
        found["other_losses" if seed == OTHER_SEED else "losses"] = whole(losses, trainee.plan)
    return found | {"validation_loss": validate(trainee, validation)}


def same_bits(trainee: Trainee) -> dict[str, Any]:
    """Compare two deterministic runs bit by bit. None, with the reason, where an operation has no such kernel.

    A graph would be made anew for them. There, and where the first parameters are not kept, a model of a few layers
    runs.
    """
    try:
        if trainee.plan.compiled or trainee.way.change or not trainee.plan.keeps_start:
            sizes = replace(trainee.plan.sizes, layers=SAME_LAYERS)
            plan = replace(trainee.plan, sizes=sizes, keeps_start=True)
            with deterministic():
                trainee = Trainee(trainee.way, plan, trainee.text, None)
        first, second = bits(trainee), bits(trainee)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return {"same_bits": None, "why_no_bits": describe(error)}
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return {"same_bits": on_all_ranks(same, trainee.plan)}


def validate(trainee: Trainee, text: Tensor) -> float:
    """Return the mean loss of text that was not trained on, without compiling."""
    sizes = trainee.plan.sizes
    held_out, loss = batches(text, sizes.batch, sizes.length, VALIDATION_SEED), loss_of(trainee.model)
    with torch.no_grad():
        return statistics.fmean(loss(next(held_out)).item() for _ in range(VALIDATION_BATCHES))


def bits(trainee: Trainee) -> list[Tensor]:
    """Return the losses of a few deterministic steps, and the parameters behind them."""
    trainee.restart()
    source = trainee.batches(SEED)
    with deterministic():
        losses = [trainee.step(next(source)) for _ in range(SAME_STEPS)]
    return [*losses, *(local(each).detach().clone() for each in trainee.parameters)]


def whole(losses: list[Tensor], plan: Plan) -> list[float]:
    """Read losses, their means over data-parallel ranks."""
    stacked = torch.stack(losses).detach()
    if plan.meshes is not None and not plan.one_rank:
        dist.all_reduce(stacked)
        stacked /= dist.get_world_size()
    return stacked.tolist()
