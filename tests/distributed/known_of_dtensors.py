# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of DTensors like an earlier one run past DTensor's engine, in each of four processes on a CPU. They have the
bits, the placements and the gradients of calls that the engine ran.

test_four_processes.py starts it: python tests/distributed/known_of_dtensors.py
"""

import contextlib
import copy
import gc
import itertools
import weakref

import by_address
import processes
import pytest
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from every_op import OPS
from placed_calls import (
    EPS,
    ROWS,
    WHOLE,
    N,
    assert_seen,
    described,
    made,
    make_known,
    noting,
    outcome,
    rows,
    step,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tilegym_rmsnorm import RMSNorm, rms_norm, use_backend
from tilegym_rmsnorm.call import tensors as call_tensors
from tilegym_rmsnorm.routes import known_calls


def each_op(mesh) -> None:
    """In each placement that no engine changes, recorded or not: bits, placements, specs and gradients."""
    grid = init_device_mesh("cpu", (2, 2))
    with noting() as noted:
        for op in OPS:
            for name, kind in op.placed.items():
                call = op.make(op.longer(op.longer(kind)), device="cpu")
                alone = [WHOLE, *map(Shard, range(call.dys[0].ndim - 1))]
                pairs = zip([*alone, ROWS], [*alone[1:], WHOLE, ROWS], strict=True)
                choices = [(mesh, [at], needs_grad) for at in alone for needs_grad in (False, True)]
                choices += [(grid, list(pair), True) for pair in pairs]
                for one_mesh, at, needs_grad in choices:
                    first, *others = (run_op(op, call, one_mesh, at, needs_grad, noted) for _ in range(3))
                    for results, _ in others:
                        assert [described(t) for t in results] == [described(t) for t in first[0]], (name, at)
                    if stays_in_place(call, one_mesh, at):
                        assert not others[-1][1], (op.name, name, at, needs_grad, others[-1][1])


def collectives_that_still_run(mesh) -> None:
    """Results of collectives, as sequence parallelism has them: x, dy or both are waited for."""
    running = []

    def reduced(placed):
        local = collectives.all_reduce(placed.to_local().detach() / 4, "sum", mesh)
        placed = DTensor.from_local(local, mesh, [ROWS])
        running.append(placed._local_tensor)
        assert type(running[-1]) is collectives.AsyncCollectiveTensor and not running[-1].completed
        return placed

    for of_x, of_dy, needs_grad in (
        (True, False, False),
        (True, False, True),
        (False, True, True),
        (True, True, True),
    ):

        def call(x, weight, dy, of_x=of_x, of_dy=of_dy, needs_grad=needs_grad):
            x, dy = reduced(x) if of_x else x.detach(), reduced(dy) if of_dy else dy
            return step(x.requires_grad_(needs_grad), weight.detach().requires_grad_(needs_grad), dy)

        running.clear()
        assert not assert_seen(mesh, call), (of_x, of_dy, needs_grad)
        of_known = running[: len(running) // 2]  # the engine ran the others
        assert of_known and all(each.completed for each in of_known)


def stays_in_place(call, mesh, at) -> bool:
    """Whether each process has rows of all tensors. Plain tables are replicated: beside a sharded sequence each process
    takes its part."""
    if call.fixed and any(place in (Shard(0), Shard(1)) for place in at):
        return False
    heads = [each for each in call.leaves.values() if each.ndim == call.dys[0].ndim]
    placed = processes.placed((each.detach() for each in heads), mesh, [at] * len(heads))
    shards = [call_tensors.shards_of(each) for each in placed]
    return all(each.to_local().numel() for each in placed) and all(
        each.shape[dim] >= count
        for each, counts in zip(heads, shards, strict=True)
        for dim, count in counts.items()
    )


def run_op(op, call, mesh, at, needs_grad, noted):
    """Return the results and what was noted."""
    ndim = call.dys[0].ndim
    of_heads = [Shard(0) if place == Shard(ndim - 2) else WHOLE for place in at]
    places = [
        at if each.ndim == ndim else of_heads if each.ndim == 2 else [WHOLE] * mesh.ndim
        for each in call.leaves.values()
    ]
    leaves = [each.detach().requires_grad_(needs_grad) for each in call.leaves.values()]
    leaves = processes.placed(leaves, mesh, places)
    dys = processes.placed(call.dys, mesh, [at] * len(call.dys))
    noted.take()
    results = call.public(*leaves, *call.fixed.values())
    gradients = torch.autograd.grad(results, leaves, dys) if needs_grad else ()
    return (*results, *gradients), noted.take()


def each_mode(mesh) -> None:
    """Grad mode, inference mode, and which tensors need a gradient make calls of their own, each known."""
    modes = torch.no_grad, torch.enable_grad, torch.inference_mode
    make_known(mesh)
    for needs in itertools.product((False, True), repeat=2):
        for mode in modes:
            x, weight, dy = (each.detach() for each in made(mesh))
            x.requires_grad_(needs[0]), weight.requires_grad_(needs[1])

            def run(mode=mode, given=(x, weight, dy)):
                with mode():
                    return step(*given)

            after = outcome(run)
            with noting() as noted:
                assert outcome(run) == after and outcome(run) == after
                noted.take()
                run()
                assert not noted.take(), (needs, mode)
            known_calls.forget()
            assert outcome(run) == after, (needs, mode)


def tensors_made_in_inference_mode(mesh) -> None:
    """Autograd cannot save them: they are copied."""
    with torch.inference_mode():
        x, _, _ = made(mesh, needs_grad=False)
    assert_seen(mesh, lambda _, weight, dy: step(x, weight, dy))


def own_values(mesh) -> None:
    """Other tensors at other addresses, and a weight that was changed in place or replaced."""
    make_known(mesh)
    x, weight, dy = made(mesh)
    x = distribute_tensor(3 * rows(5), mesh, [Shard(0)]).requires_grad_()
    for change in (
        lambda: None,
        lambda: weight.detach().mul_(2),
        lambda: weight._local_tensor.detach().fill_(3),
    ):
        change()
        with noting() as noted:
            got = step(x, weight, dy)
            assert not noted.take()
        leaves = [each.full_tensor().detach().requires_grad_() for each in (x, weight)]
        for one, other in zip(got, step(*leaves, dy.full_tensor(), backend="torch"), strict=True):
            torch.testing.assert_close(one.full_tensor().detach(), other.detach())


def another_mesh(mesh) -> None:
    """One that is equal, and one of process groups that were destroyed: results are of the mesh of the call."""
    grids = [init_device_mesh("cpu", (2, 2)) for _ in range(2)]
    assert grids[0] == grids[1] and grids[0] is not grids[1]
    expected = None
    for i, grid in enumerate((grids[0], grids[1], grids[0], None)):
        if grid is None:  # as after destroy_process_group and a new init_process_group
            for old in grids:
                for dim in range(2):
                    with contextlib.suppress(ValueError, AssertionError, KeyError):  # meshes may share groups
                        dist.destroy_process_group(old.get_group(dim))
            grid = init_device_mesh("cpu", (2, 2))
        with noting() as noted:
            for count in range(3):
                noted.take()
                results = step(*made(grid, [Shard(0), Shard(1)]))
                if i == count == 0:
                    expected = [each.full_tensor().detach() for each in results]
                    continue
                assert not noted.take(), (i, count)
                assert all(each.device_mesh is grid for each in results), i
                whole = [each.full_tensor().detach() for each in results]
                assert all(torch.equal(one, other) for one, other in zip(whole, expected, strict=True))


def backward_passes(mesh) -> None:
    """Run those of a known forward: twice, with hooks that change what was saved or dy, and differentiated twice."""

    def retained(x, weight, dy):
        y = rms_norm(x, N, weight, EPS)
        found = [torch.autograd.grad(y, (x, weight), dy, retain_graph=keep) for keep in (True, False)]
        return *found[0], *found[1]

    def freed(x, weight, dy):
        y = rms_norm(x, N, weight, EPS)
        torch.autograd.grad(y, x, dy)
        return torch.autograd.grad(y, x, dy)

    def twice(x, weight, dy):
        first = torch.autograd.grad(rms_norm(x, N, weight, EPS), (x, weight), dy, create_graph=True)
        total = sum(each.square().sum() for each in first)
        return *(each.detach() for each in first), *torch.autograd.grad(total, (x, weight))

    def hooked(x, weight, dy):
        x = x.clone()
        seen = []
        x.register_hook(lambda gradient: (seen.append(gradient.placements), 2 * gradient)[1])
        y = rms_norm(x, N, weight, EPS)
        y.register_hook(lambda gradient: gradient.redistribute(placements=[WHOLE]))
        return *torch.autograd.grad(y, (x, weight), dy), str(seen)

    def packed(x, weight, dy):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen.append((type(t).__name__, tuple(t.shape))), t)[1], lambda t: t.clone()
        ):
            y = rms_norm(x, N, weight, EPS)
        return *torch.autograd.grad(y, (x, weight), dy), str(seen)

    def unpacked_otherwise(x, weight, dy):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.redistribute(placements=[WHOLE])
        ):
            y = rms_norm(x, N, weight, EPS)
        return torch.autograd.grad(y, (x, weight), dy)

    def changed_in_place(x, weight, dy):
        x = x.clone()
        y = rms_norm(x, N, weight, EPS)
        x.mul_(2)
        return torch.autograd.grad(y, weight, dy)

    def recomputed(x, weight, dy):
        y = checkpoint(lambda x: rms_norm(x, N, weight, EPS).sin(), x, use_reentrant=False)
        return torch.autograd.grad(y, (x, weight), dy)

    def recomputed_by_reentry(x, weight, dy):
        y = checkpoint(lambda x: rms_norm(x, N, weight, EPS).sin(), x, use_reentrant=True)
        x.grad = weight.grad = None
        y.backward(dy)
        return x.grad, weight.grad

    def of_a_bias_alone(x, weight, dy):
        bias = weight.detach().requires_grad_()
        for _ in range(3):
            y = rms_norm(x.detach(), N, weight.detach(), EPS, bias=bias)
            results = torch.autograd.grad(y, bias, dy)
        return results

    def expanded(x, weight, dy):
        return torch.autograd.grad(rms_norm(x, N, weight, EPS).sum(), (x, weight))

    def strided(x, weight, dy):
        local = dy.to_local().transpose(0, 1).contiguous().transpose(0, 1)
        return step(x, weight, DTensor.from_local(local, mesh, [Shard(0)]))

    def to_leaves(x, weight, dy):
        x.grad = weight.grad = None
        for _ in range(2):
            rms_norm(x, N, weight, EPS).backward(dy)
        return x.grad, weight.grad

    for change in (
        *(retained, freed, twice, hooked, packed, unpacked_otherwise, changed_in_place, recomputed),
        *(recomputed_by_reentry, of_a_bias_alone, expanded, strided, to_leaves),
    ):
        assert_seen(mesh, change)


def a_checkpoint_of_which_the_second_call_is_known(mesh) -> None:
    """It saves as many tensors as the first, of the same shapes."""
    x, weight, dy = made(mesh)
    for residual in (None, dy):
        known_calls.forget()

        def run(x, residual=residual):
            y = rms_norm(x, N, weight, EPS, residual=residual)
            return y if residual is None else y[0] + y[1]

        y = checkpoint(run, x, use_reentrant=False)
        found = torch.autograd.grad(y, (x, weight), dy)
        for one, other in zip(found, torch.autograd.grad(run(x), (x, weight), dy), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())


def one_result_of_two(mesh) -> None:
    """And a residual that is x, or that needs no gradient."""

    def alone(index):
        return lambda x, weight, dy: torch.autograd.grad(
            rms_norm(x, N, weight, EPS, residual=dy)[index], (x, weight), dy, allow_unused=True
        )

    for index in (0, 1):
        assert_seen(mesh, alone(index), residual=made(mesh)[2])
    for _ in range(2):
        assert_seen(mesh, lambda x, weight, dy: step(x, weight, dy, residual=x))


def backends(mesh) -> None:
    """Choose those that read by address: by name, in effect, and after another one."""
    given = make_known(mesh)
    with pytest.MonkeyPatch.context() as patch:
        by_address.use(patch)
        for _ in range(3):
            by_address.calls.clear()
            step(*given)
            assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]
        with use_backend("torch"):
            by_address.calls.clear()
            step(*given)
            y = rms_norm(*given[:1], N, given[1], EPS)
        assert not by_address.calls
        known = rms_norm(given[0], N, given[1], EPS)
        with use_backend("torch"):  # a backward runs on the backend of its forward
            torch.autograd.grad(known, given[0], given[2])
        assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]
        torch.autograd.grad(y, given[0], given[2])
        assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]
        x, weight, dy = given
        for _ in range(3):  # a gradient of a bias alone is a sum, for which no backend is asked
            y = rms_norm(x.detach(), N, None, EPS, bias=weight)
            by_address.calls.clear()
            torch.autograd.grad(y, weight, dy)
            assert not by_address.calls
        patch.setattr(known_calls, "is_settled", lambda *_: False)  # as of an interpreter
        known_calls.forget()
        with noting() as noted:
            for _ in range(3):
                noted.take()
                step(*given)
                assert noted.take()
    known_calls.forget()


def nothing_is_kept(mesh) -> None:
    """No tensor of a known call lives on."""
    alive = []
    known_calls.forget()
    for _ in range(3):
        x, weight, dy = made(mesh)
        results = step(x, weight, dy)
        alive += [weakref.ref(t) for each in (x, weight, dy, *results) for t in (each, each._local_tensor)]
        del x, weight, dy, results
    gc.collect()
    assert not [each() for each in alive if each() is not None]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(N)
        self.q_norm = RMSNorm(4, heads=4)
        self.linear = torch.nn.Linear(N, N)

    def forward(self, x):
        y = self.linear(self.norm(x))
        return self.q_norm(y.unflatten(-1, (4, 4))).flatten(-2)


def training_on_two_dimensions(mesh) -> None:
    """FSDP2 over one, tensor parallelism over the other: the later steps are known, and have the gradients of one
    process."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = torch.nn.Sequential(RMSNorm(N), torch.nn.Linear(N, N), RMSNorm(N))
    for parameter in whole.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model = copy.deepcopy(whole)
    plan = {name: SequenceParallel() for name in ("0", "2")}
    parallelize_module(model, grid["tp"], plan)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=grid["dp"])
    x = rows(0, (4, 8, N))
    part = x.chunk(2)[grid.get_local_rank("dp")]
    for index in range(3):
        with noting() as noted:
            local = distribute_tensor(part, grid["tp"], [Shard(1)])
            y = model[0](local)
            (y * y).sum().backward()
            if index == 2:
                assert not noted.take(), noted.unknown
    z = whole[0](x)
    (3 * (z * z).sum()).backward()
    got = model[0].weight.grad.full_tensor()
    torch.testing.assert_close(got * 2, whole[0].weight.grad, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    processes.run_cases(globals())
