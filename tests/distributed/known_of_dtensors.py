# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of DTensors like an earlier one run past DTensor's engine, in each of four processes on a CPU. They have the
bits, the placements and the gradients of calls that the engine ran. Whatever may differ between two calls must be seen:
each case makes a call known, changes one thing, and must get what it would get as the first call of a process.

test_four_processes.py starts it: python tests/distributed/known_of_dtensors.py
"""

import contextlib
import copy
import gc
import itertools
import warnings
import weakref

import by_address
import processes
import pytest
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from every_op import OPS, note_unknown
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import RMSNorm, rms_norm, use_backend
from tilegym_rmsnorm.call import tensors as call_tensors
from tilegym_rmsnorm.routes import choose, known_calls, known_dtensors

SIZE, N, EPS = (8, 6, 16), 16, 1e-3
WHOLE, ROWS = Replicate(), Shard(0)


class Noted:
    """What no known call does, from now on: the checks, and the dispatch of an op to DTensor's engine."""

    def __init__(self, patch, ops=OPS[:2]):
        self.unknown = [note_unknown(op, patch) for op in ops]
        why_transformed = choose.why_transformed

        def noted(*tensors):  # each op asks it, at the dispatch key Autograd
            self.unknown[0].append("the engine")
            return why_transformed(*tensors)

        patch.setattr(choose, "why_transformed", noted)

    def take(self):
        found = [name for each in self.unknown for name in each]
        for each in self.unknown:
            each.clear()
        return found


@contextlib.contextmanager
def noting():
    with pytest.MonkeyPatch.context() as patch:
        yield Noted(patch)


def rows(seed=0, size=SIZE):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(mesh, at=ROWS, needs_grad=True, of_weight=WHOLE):
    """x, weight and dy."""
    placed = [at] * mesh.ndim if not isinstance(at, list) else at
    x, dy = (distribute_tensor(rows(seed), mesh, placed) for seed in (0, 1))
    weight = distribute_tensor(rows(2, (N,)) + 2, mesh, [of_weight] * mesh.ndim)
    # Not detached: the engine may return a DTensor of another mesh, which is equal.
    return x.requires_grad_(needs_grad), weight.requires_grad_(needs_grad), dy


def step(x, weight, dy, **options):
    results = rms_norm(x, N, weight, EPS, **options)
    several = results if isinstance(results, tuple) else (results,)
    if not any(each.requires_grad for each in several):
        return several
    leaves = [each for each in (x, weight) if each.requires_grad]
    return *several, *torch.autograd.grad(several, leaves, [dy] * len(several))


def described(tensor):
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if type(tensor) is not DTensor:
        return type(tensor), tensor.shape, tensor.dtype, None if tensor.is_meta else tensor.tolist()
    local = tensor._local_tensor
    of_both = [(t.shape, t.stride(), t.dtype, t.is_inference(), t.device) for t in (tensor, local)]
    node = None if tensor.grad_fn is None else tensor.grad_fn.name()
    values = local.tolist() if type(local) is torch.Tensor else collectives.wait_tensor(local).tolist()
    return tensor._spec, *of_both, tensor.requires_grad, local.requires_grad, node, values


def outcome(function, *given):
    """Describe the results of a call, or its error."""
    try:
        results = function(*given)
    except Exception as error:  # any: those of PyTorch too
        return type(error), str(error)[:60]
    return [described(each) for each in (results if isinstance(results, tuple) else (results,))]


def make_known(on, at=ROWS, **more):
    """Make both passes known, recorded and not, and return the tensors of a call. at: as of `made`."""
    known_calls.forget()
    with noting() as noted:
        for needs_grad in (False, True, False, True):
            given = made(on, at, needs_grad)
            noted.take()
            step(*given, **more)
        assert not noted.take(), "a call like the one before was run by DTensor's engine"
    return given


def assert_seen(mesh, change, at=ROWS, **more) -> list:
    """A call that is changed gets right behind a known one what it gets as the first. change: takes x, weight and dy.
    Return what the known call did not do."""
    given = make_known(mesh, at, **more)
    with noting() as noted:
        got = outcome(change, *given)
        found = noted.take()
    known_calls.forget()
    expected = outcome(change, *given)
    assert got == expected, (got, expected)
    return found


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
    """Of x, of a weight, of a residual and of dy; also beside replicated ones, which have such local tensors."""

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
    """Of a sequence that was sharded, and then flattened."""

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
    """As uneven shards are, or a tensor that is replicated."""

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
    """Not plain, or of another class: a subclass, a collective that runs, a negation that is pending, fake tensors, no
    memory, a plain weight."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def from_local(local):
        return DTensor.from_local(local, mesh, [Shard(0)])

    def subclass(x, weight, dy):
        x, weight = (Subclass(t._local_tensor, t._spec, requires_grad=False) for t in (x, weight))
        return rms_norm(x, N, weight, EPS)

    def communicated(x, weight, dy):
        async_x = collectives.all_reduce(x.to_local().detach() / 4, "sum", mesh)
        assert isinstance(async_x, collectives.AsyncCollectiveTensor)
        return step(from_local(async_x).requires_grad_(), weight, dy)

    def of_dy(x, weight, dy):
        return step(x, weight, from_local(collectives.all_reduce(dy.to_local() / 4, "sum", mesh)))

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

    changes = subclass, communicated, of_dy, negated, negated_dy, fake, freed, plain_dy, replicated_weight
    for change in changes:
        assert assert_seen(mesh, change), change.__name__
    for change in (plain_weight, plain_x):  # errors, before a check that is noted
        assert_seen(mesh, change)


def tensors_that_the_checks_changed(mesh) -> None:
    """As autocast of a GPU casts them: a known call would not. Only tables that are replicated are made again."""
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


def backward_passes(mesh) -> None:
    """Of a known forward: twice, with hooks, of which some change what was saved or dy, and twice differentiated."""

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
    """Of kernels that read by address: by name, in effect, and after another one."""
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
