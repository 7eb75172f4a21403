# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of DTensors that DTensor's engine must run, in each of four processes on a CPU: each case makes a call known,
changes one thing, and must get what it would get as the first call of a process.

test_four_processes.py starts it: python tests/distributed/unknown_of_dtensors.py
"""

import copy
import warnings

import processes
import pytest
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
import torch.distributed as dist
from placed_calls import EPS, ROWS, WHOLE, N, assert_seen, described, made, make_known, noting, rows, step
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.call import tensors as call_tensors
from tilegym_rmsnorm.routes import known_calls, known_dtensors


def placed_otherwise(mesh) -> None:
    def change(at, of_weight=WHOLE, of_dy=None):
        return lambda *_: step(*made(mesh, at, of_weight=of_weight)[:2], made(mesh, of_dy or at)[2])

    for at in (WHOLE, Shard(1), Shard(-3)):
        assert_seen(mesh, change(at))
    for at in (WHOLE, Shard(1), Shard(2)):
        assert assert_seen(mesh, change(Shard(0), of_dy=at))
    assert assert_seen(mesh, change(Shard(0), of_weight=Shard(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are split
        assert assert_seen(mesh, change(Shard(2)))


def partial_sums(mesh) -> None:
    """Sum x, a weight, a residual and dy; also beside replicated ones, which have such local tensors."""

    def part(tensor):
        return DTensor.from_local(tensor.full_tensor().detach() / 4, mesh, [Partial()])

    for at in (ROWS, WHOLE):
        assert assert_seen(mesh, lambda x, weight, dy: step(part(x).requires_grad_(), weight, dy), at)
        assert assert_seen(mesh, lambda x, weight, dy: step(x, part(weight).requires_grad_(), dy), at)
        assert assert_seen(mesh, lambda x, weight, dy: step(x, weight, part(dy)), at)
    x, _, _ = made(mesh)
    residual = x.detach()
    assert assert_seen(
        mesh, lambda x, weight, dy: step(x, weight, dy, residual=part(residual)), residual=residual
    )


def shards_with_strides(mesh) -> None:
    """Flatten a sequence that was sharded."""

    def change(x, weight, dy):
        x, dy = (distribute_tensor(rows(seed, (4, 8, N)), mesh, [Shard(1)]).flatten(0, 1) for seed in (0, 1))
        return step(x.detach().requires_grad_(), weight, dy)

    if processes.CAN_FLATTEN:
        assert assert_seen(mesh, change)
        with noting() as noted:
            for _ in range(3):
                noted.take()
                change(*made(mesh))
                assert noted.take()


def fewer_rows_than_processes(mesh) -> None:
    def change(_, weight, dy):
        x, dy = (distribute_tensor(rows(seed, (3, 6, N)), mesh, [Shard(0)]) for seed in (0, 1))
        return step(x.requires_grad_(), weight, dy)

    assert assert_seen(mesh, change)


def one_local_shape_of_other_global_shapes(mesh) -> None:
    """Take uneven shards, and a tensor that is replicated."""

    def change(shape, at):
        def run(x, weight, dy):
            local, of_dy = x.to_local().detach(), dy.to_local()
            stride = torch.empty(shape, device="meta").stride()
            placed = [
                DTensor.from_local(each, mesh, [at], shape=torch.Size(shape), stride=stride)
                for each in (local, of_dy)
            ]
            return step(placed[0].requires_grad_(), weight, placed[1])

        return run

    for shape, at in (((7, 6, N), Shard(0)), ((2, 6, N), WHOLE), ((2, 24, N), Shard(1))):
        assert_seen(mesh, change(shape, at))


def shards_in_another_order(mesh) -> None:
    """Two dimensions of a mesh shard one of x, the second before the first: the rows of a process are others."""
    if (entry := getattr(specs, "ShardOrderEntry", None)) is None:
        return
    grid = init_device_mesh("cpu", (2, 2))
    x, weight, dy = made(grid, [Shard(0), Shard(0)], needs_grad=False)
    for _ in range(2):
        step(x, weight, dy)
    spec = specs.DTensorSpec(grid, x.placements, x._spec.tensor_meta, (entry(0, (1, 0)),))
    x = DTensor(rows().chunk(4)[dist.get_rank() % 2 * 2 + dist.get_rank() // 2], spec, requires_grad=False)
    for _ in range(3):
        (y,) = step(x, weight, dy)
        torch.testing.assert_close(
            y.full_tensor(), torch.nn.functional.rms_norm(rows(), (N,), rows(2, (N,)) + 2, EPS)
        )


class Mode(BaseTorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, *given):
        self.seen.append(function)
        return super().__torch_function__(function, *given)


def watched(mesh) -> None:
    """Whoever watches a call sees the engine run it."""

    def under(block):
        def run(*given):
            with block:
                return step(*given)

        return run

    comms, mode = CommDebugMode(), Mode()
    for block in (comms, FlopCounterMode(display=False), torch.autocast("cpu", torch.bfloat16)):
        assert assert_seen(mesh, under(block)), block
    assert comms.get_total_counts() == 0
    for block in (mode, torch.device("cpu"), torch.autograd.set_multithreading_enabled(False)):
        assert_seen(mesh, under(block))
    assert mode.seen.count(rms_norm) == 2
    given = make_known(mesh)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(*given)
    names = {event.name for event in profiler.events()}
    assert {"tilegym_rmsnorm::rms_norm_forward", "tilegym_rmsnorm::rms_norm_backward"} <= names

    def with_tangent(x, weight, dy):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(
                rms_norm(forward_ad.make_dual(x.detach(), dy), N, weight, EPS)
            ).tangent

    assert_seen(mesh, with_tangent)
    assert_seen(mesh, lambda x, weight, dy: torch.func.grad(lambda x: rms_norm(x, N, weight, EPS).sum())(x))
    assert_seen(mesh, lambda x, weight, dy: torch.vmap(lambda x: rms_norm(x, N, weight, EPS))(x.detach()))


def in_graphs(mesh) -> None:
    given = make_known(mesh)
    expected = step(*given)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: rms_norm(x, N, w, EPS), backend="aot_eager", fullgraph=True)
    y = compiled(*given[:2])
    for one, other in zip((y, *torch.autograd.grad(y, given[:2], given[2])), expected, strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor()) and one.placements == other.placements
    traced = make_fx(lambda x, w: rms_norm(x, N, w, EPS).to_local())(*(t.detach() for t in given[:2]))
    assert torch.ops.tilegym_rmsnorm.rms_norm_forward.default in [n.target for n in traced.graph.nodes]
    assert_seen(mesh, lambda *given: step(*given))


class Subclass(DTensor):
    pass


def other_tensors(mesh) -> None:
    """Not plain, or of another class: a subclass, a negation that is pending, fake tensors, no memory, a plain
    weight."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def from_local(local):
        return DTensor.from_local(local, mesh, [Shard(0)])

    def subclass(x, weight, dy):
        x, weight = (Subclass(t._local_tensor, t._spec, requires_grad=False) for t in (x, weight))
        return rms_norm(x, N, weight, EPS)

    def negated(x, weight, dy):
        return step(from_local(torch._neg_view(x.to_local().detach())).requires_grad_(), weight, dy)

    def negated_dy(x, weight, dy):
        return step(x, weight, from_local(torch._neg_view(dy.to_local())))

    def fake(x, weight, dy):
        mode = FakeTensorMode()
        x, weight = (copy.copy(t.detach()) for t in (x, weight))
        for each in (x, weight):
            each._local_tensor = mode.from_tensor(each._local_tensor)
        return tuple(rms_norm(x, N, weight, EPS).shape)

    def freed(x, weight, dy):
        x = from_local(x.to_local().detach().clone())
        x._local_tensor.untyped_storage().resize_(0)
        return step(x, weight.detach(), dy)

    def plain_weight(x, weight, dy):
        return step(x, weight.full_tensor().detach().requires_grad_(), dy)

    def replicated_weight(x, weight, dy):
        with implicit_replication():
            return rms_norm(x.detach(), N, weight.full_tensor().detach(), EPS)

    def plain_x(x, weight, dy):
        return step(x.full_tensor().detach(), weight, dy)

    def plain_dy(x, weight, dy):
        return step(x, weight, dy.full_tensor())

    changes = subclass, negated, negated_dy, fake, freed, plain_dy, replicated_weight
    for change in changes:
        assert assert_seen(mesh, change), change.__name__
    for change in (plain_weight, plain_x):  # errors, before a check that is noted
        assert_seen(mesh, change)


def tensors_that_the_checks_changed(mesh) -> None:
    """Autocast of a GPU casts them: a known call would not. Only tables that are replicated are made again."""
    x, weight, _ = (each.detach() for each in made(mesh))
    local = weight.to_local()
    table, copied = (DTensor.from_local(each, mesh, [WHOLE]) for each in (local, local.clone()))
    assert known_dtensors._added((x, weight), (x, weight.clone())) is None
    assert known_dtensors._added((x, local), (x, copied)) is None
    added = known_dtensors._added((x, local), (x, table))
    assert added is not None and [described(each) for each in added((x, local))] == [
        described(x),
        described(table),
    ]


def local_tensors_that_need_gradients(mesh) -> None:
    """`distribute_tensor` of a leaf makes them. A known call that is not recorded records nothing of them."""
    x, weight, dy = made(mesh, needs_grad=False)
    x._local_tensor.requires_grad_()
    for _ in range(3):
        (y,) = step(x, weight, dy)
        assert not y._local_tensor.requires_grad


def another_pytorch(mesh) -> None:
    """Without the private names no call is known, and all are right."""
    expected = step(*make_known(mesh))

    def lacking(*_, **__):
        raise TypeError("of another signature")

    changes = (call_tensors, "_has_parts", lambda cls: False), (DTensor, "__new__", lacking)
    for owner, name, value in changes:
        known_calls.forget()
        given = made(mesh)
        with pytest.MonkeyPatch.context() as patch, noting() as noted:
            if owner is call_tensors:
                patch.setattr(owner, name, value)
            else:
                patch.setattr(known_dtensors, "_wrapped", value)
            for _ in range(3):
                noted.take()
                got = step(*given)
                assert noted.take()
        assert [described(t) for t in got] == [described(t) for t in expected]


if __name__ == "__main__":
    processes.run_cases(globals())
