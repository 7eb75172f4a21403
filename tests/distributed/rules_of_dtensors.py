# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""How the ops are sharded (sharding.py), in each of four processes on a CPU: values of one process, placements, and
what is communicated.

test_four_processes.py starts it: python tests/distributed/rules_of_dtensors.py
"""

import warnings

import by_address
import processes
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import RMSNorm, rms_norm, use_backend
from tilegym_rmsnorm.ops.norm import sharding
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD
from tilegym_rmsnorm.routes import sharding_rules

B, T, H, N = 4, 5, 6, 16  # neither tokens nor heads are as many in each process
WHOLE = Replicate()
EPS = 1e-3
# PyTorch's own norm of a DTensor with fewer rows than processes: its backward communicates before 2.13; from 2.14 on it
# gathers the rows.
KEEPS_ROWS = "2.13" <= TorchVersion(torch.__version__) < "2.14"
GATHERS_ROWS = TorchVersion(torch.__version__) >= "2.14"
RESULTS = "y", "residual_out", "dx", "d_residual", "dw", "db"


def tensors(*size, dims=1, of_heads=False):
    """x, residual, weight, bias, dy and d_residual_out of all processes."""
    generator = torch.Generator().manual_seed(0)
    of_vectors = size[-dims - of_heads :]
    shapes = size, size, of_vectors, of_vectors, size, size
    return [torch.randn(shape, generator=generator) for shape in shapes]


def step(given, normalized_shape, is_block=True, **options):
    """y, residual_out, and the gradients of x, residual, weight and bias; None where there are none."""
    leaves = [
        None if t is None else t.detach().requires_grad_(t.requires_grad or i < 2)
        for i, t in enumerate(given[:4])
    ]
    x, residual, weight, bias = leaves
    if is_block:
        y, residual_out = rms_norm(
            x, normalized_shape, weight, EPS, bias=bias, residual=residual, residual_alpha=0.5, **options
        )
        torch.autograd.backward((y, residual_out), given[4:])
    else:
        y, residual_out = rms_norm(x, normalized_shape, weight, EPS, bias=bias, **options), None
        y.backward(given[4])
    gradients = [None if t is None else t.grad for t in leaves]
    return dict(zip(RESULTS, (y.detach(), residual_out, *gradients), strict=True))


def learned(*given):
    return [t if t is None or i not in (2, 3) else t.detach().requires_grad_() for i, t in enumerate(given)]


def whole(results):
    return {k: t.full_tensor().detach() if isinstance(t, DTensor) else t for k, t in results.items()}


def compare(found, expected) -> None:
    """Rows have the bits of one process; sums over rows are made in another order."""
    for name, result in whole(found).items():
        if expected[name] is None:
            assert result is None, name
        elif name in ("dw", "db"):
            torch.testing.assert_close(result, expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(result, expected[name]), name


def by_the_ops_themselves(mesh) -> None:
    """Called before all others: an op registers the rules itself."""
    x, residual, weight, bias, dy, _ = tensors(B, T, N)
    placed = [distribute_tensor(t, mesh, [at]) for t, at in ((x, Shard(1)), (weight, WHOLE), (dy, Shard(1)))]
    more = 1.0, None, None, None  # alpha, and dtypes and the backend
    y, rstd, residual_out = FORWARD(placed[0], None, placed[1], None, 1, EPS, 0.0, "once", *more)
    assert y.placements == rstd.placements == (Shard(1),) and rstd.shape == (B, T, 1)
    assert residual_out is None
    summed = FORWARD(placed[0], placed[0], placed[1], None, 1, EPS, 0.0, "once", *more)
    assert [t.placements for t in summed] == [(Shard(1),)] * 3
    for wanted in (1, 2, 3, 5, 7, 8, 15, 1):  # each has placements of its own
        for d_residual_out in (None, placed[2]):
            given = placed[2], placed[0], placed[1], rstd, d_residual_out
            dx, *others = BACKWARD(*given, wanted, 1, 0.0, "once", *more, None, None)
            assert dx.placements == (
                (Shard(1),) if wanted & 1 else (WHOLE,)
            )  # a dx without elements has no dim 1
            at = [None if t is None else t.placements for t in others]
            assert at == [
                (Partial(),) if wanted & 2 else None,
                (Partial(),) if wanted & 4 else None,
                (Shard(1),) if wanted & 8 else None,
            ]
    with torch.inference_mode():
        y = rms_norm(placed[0], N, placed[1], EPS)
    assert torch.equal(y.full_tensor(), F.rms_norm(x, (N,), weight, EPS))


def no_row_is_communicated(mesh) -> None:
    """In any dimension but the normalized ones, by backends that read a DTensor's local memory alone."""
    grid = init_device_mesh("cpu", (2, 2))
    meshes = {mesh: [[Shard(d)] for d in range(3)] + [[WHOLE]]}
    meshes[grid] = [
        [Shard(0), Shard(1)],
        [WHOLE, Shard(1)],
        [Shard(2), WHOLE],
        [Shard(0), Shard(0)],
        [Shard(2), Shard(0)],
    ]
    for of_heads in (False, True):
        given = learned(*tensors(B, T, H, N, of_heads=of_heads))
        for is_block in (True, False):
            expected = step(given, N, is_block, backend="torch")
            for one_mesh, all_placements in meshes.items():
                for placements in all_placements:
                    of_vectors = [Shard(0) if of_heads and at == Shard(2) else WHOLE for at in placements]
                    places = placements, placements, of_vectors, of_vectors, placements, placements
                    placed = processes.placed(given, one_mesh, places)
                    with CommDebugMode() as communication:
                        found = step(placed, N, is_block)
                    assert communication.get_total_counts() == 0, (
                        placements,
                        communication.get_comm_counts(),
                    )
                    compare(found, expected)
                    assert found["y"].placements == found["dx"].placements == tuple(placements)
                    partial = [
                        at if at == Shard(0) or given_at == WHOLE else Partial()
                        for at, given_at in zip(of_vectors, placements, strict=True)
                    ]
                    assert found["dw"].placements == found["db"].placements == tuple(partial), partial


def several_normalized_dimensions(mesh) -> None:
    for dims in (2, 3):
        given = learned(*tensors(B, T, H, N, dims=dims))
        expected = step(given, given[0].shape[-dims:], backend="torch")
        for dim in range(4 - dims):
            places = [[WHOLE] if i in (2, 3) else [Shard(dim)] for i in range(6)]
            placed = processes.placed(given, mesh, places)
            with CommDebugMode() as communication:
                found = step(placed, given[0].shape[-dims:])
            assert communication.get_total_counts() == 0
            compare(found, expected)


def what_needs_no_gradient(mesh) -> None:
    """Of each of x, weight and bias by itself, and without a weight."""
    x, _, weight, bias, dy, _ = tensors(B, T, N)
    for has_weight in (True, False):
        whole = x, weight if has_weight else None, bias, dy
        places = Shard(1), WHOLE, WHOLE, Shard(1)
        placed = [
            None if t is None else distribute_tensor(t, mesh, [at])
            for t, at in zip(whole, places, strict=True)
        ]
        for needs in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
            if needs[1] and not has_weight:
                continue

            def run(given, needs=needs, **options):
                leaves = [
                    None if t is None else t.detach().requires_grad_(need)
                    for t, need in zip(given, needs, strict=False)
                ]
                y = rms_norm(leaves[0], N, leaves[1], EPS, bias=leaves[2], **options)
                y.backward(given[3])
                return [None if t is None or t.grad is None else t.grad for t in leaves]

            expected = run(whole, backend="torch")
            with CommDebugMode() as communication:
                found = run(placed)
            assert communication.get_total_counts() == 0, needs
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None), needs
                if one is not None:
                    torch.testing.assert_close(one.full_tensor(), other)


def gradient_placed_unlike_x(mesh) -> None:
    x, _, weight, _, dy, _ = tensors(B, T, N)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rms_norm(leaves[0], N, leaves[1], EPS, backend="torch").backward(dy)
    part = DTensor.from_local((1 + dist.get_rank()) / 10 * dy, mesh, [Partial()])
    for placement in (Shard(0), Shard(1), WHOLE):
        for gradient in (
            *(distribute_tensor(dy, mesh, [at]) for at in (WHOLE, Shard(0), Shard(1), Shard(2))),
            part,
        ):
            places = (x, placement), (weight, WHOLE)
            placed = [distribute_tensor(t, mesh, [at]).requires_grad_() for t, at in places]
            rms_norm(placed[0], N, placed[1], EPS).backward(gradient)
            for one, other in zip(placed, leaves, strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-5)


def gradient_still_communicated(mesh) -> None:
    """As an AsyncCollectiveTensor, of a local tensor and of a DTensor's."""

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            reduced = collectives.all_reduce(dy, "sum", mesh)
            assert isinstance(reduced, collectives.AsyncCollectiveTensor)
            return reduced

    x, _, weight, _, dy, _ = tensors(B, T, N)
    expected = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    rms_norm(expected[0], N, expected[1], EPS, backend="torch").backward(dy)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    Reduced.apply(rms_norm(leaves[0], N, leaves[1], EPS)).backward(dy / processes.PROCESSES)
    placed = [distribute_tensor(t, mesh, [WHOLE]).requires_grad_() for t in (x, weight)]
    y = rms_norm(placed[0], N, placed[1], EPS).to_local()
    Reduced.apply(y).backward(dy / processes.PROCESSES)
    local = DTensor.from_local(collectives.all_reduce(x / processes.PROCESSES, "sum", mesh), mesh, [WHOLE])
    y = rms_norm(local, N, distribute_tensor(weight, mesh, [WHOLE]), EPS).full_tensor()
    torch.testing.assert_close(y, rms_norm(x, N, weight, EPS, backend="torch"))
    for one, other, third in zip(leaves, expected, placed, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
        torch.testing.assert_close(third.grad.full_tensor(), other.grad)


def rows_that_are_split(mesh) -> None:
    """They are gathered, which is said once; of PyTorch's operations the mean alone communicates."""
    x, _, weight, _, _, _ = tensors(B, T, N)
    expected = F.rms_norm(x, (N,), weight, EPS)
    placed = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(weight, mesh, [WHOLE])
    with CommDebugMode() as communication, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = rms_norm(placed[0], N, placed[1], EPS, backend="torch")
    assert y.placements == (Shard(2),)
    counts = communication.get_comm_counts()
    assert set(counts) == {torch.ops.c10d_functional.all_reduce} and sum(counts.values()) == 1, counts
    torch.testing.assert_close(y.full_tensor(), expected)
    with pytest.MonkeyPatch.context() as patch:
        by_address.use(patch)
        with pytest.warns(UserWarning, match="sharded in a normalized dimension"):
            y = rms_norm(placed[0], N, placed[1], EPS)
        assert by_address.calls == ["rms_norm_forward"]
        torch.testing.assert_close(y.full_tensor(), expected)
        with warnings.catch_warnings(), use_backend("cutile"):
            warnings.simplefilter("error")
            rms_norm(placed[0].requires_grad_(), N, placed[1], EPS).sum().backward()
        assert by_address.calls == ["rms_norm_forward"] * 2 + ["rms_norm_backward"]


def calls_of_ops(mesh, x_at, residual_at):
    """Each op, without and with a residual, and its arguments. Of a size of no other case: an engine that knows what is
    placed so does not ask the rules again."""
    x, residual, weight, _, dy, d_residual_out = tensors(B, T, 2 * N)
    x, residual = (distribute_tensor(t, mesh, [at]) for t, at in ((x, x_at), (residual, residual_at)))
    dy, d_residual_out = (distribute_tensor(t, mesh, [x_at]) for t in (dy, d_residual_out))
    weight, rstd = (distribute_tensor(t, mesh, [WHOLE]) for t in (weight, torch.ones(B, T, 1)))
    norm, numbers = (1, EPS, 0.0, "once", 1.0, *[None] * 3), (3, 1, 0.0, "once", 1.0, *[None] * 5)
    return (
        (FORWARD, x, None, weight, None, *norm),
        (FORWARD, x, residual, weight, None, *norm),
        (BACKWARD, dy, x, weight, rstd, None, *numbers),
        (BACKWARD, dy, x, weight, rstd, d_residual_out, *numbers),
    )


def split_rows_are_said_by_every_op(mesh) -> None:
    """A backward that is called by itself says it too, and so does a sum of which the residual alone is cut."""
    residual_alone = calls_of_ops(mesh, WHOLE, Shard(2))[1]
    for op, *arguments in (*calls_of_ops(mesh, Shard(2), Shard(2)), residual_alone):
        sharding._say_that_rows_are_gathered.cache_clear()
        with pytest.warns(UserWarning, match="sharded in a normalized dimension"):
            op(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once: not of another size again
        rms_norm(distribute_tensor(torch.ones(B, 3 * N), mesh, [Shard(1)]), 3 * N)


def every_op_registers_the_rules(mesh) -> None:
    """Whichever of them is called first."""
    for op, *arguments in calls_of_ops(mesh, Shard(1), Shard(1)):
        with pytest.MonkeyPatch.context() as patch:
            registered = []
            patch.setattr(sharding_rules, "_register_rules", lambda to=registered: to.append(True))
            op(*arguments)
            assert registered, op


def weights_of_heads_beside_other_placements(mesh) -> None:
    """A sharded weight and a replicated x: nobody needs another's heads. Heads that lie in strides, whose weights do
    not: x is gathered."""
    x, _, weight, _, _, _ = tensors(B, 3, 8, N, of_heads=True)
    expected = rms_norm(x, N, weight, EPS)
    placed = distribute_tensor(x, mesh, [WHOLE]), distribute_tensor(weight, mesh, [Shard(0)])
    with CommDebugMode() as communication:
        y = rms_norm(placed[0], N, placed[1], EPS)
    assert y.placements == (Shard(2),) and communication.get_total_counts() == 0
    assert torch.equal(y.full_tensor(), expected)
    if processes.CAN_FLATTEN:
        strided = distribute_tensor(x.unflatten(2, (2, 4)), mesh, [Shard(3)]).flatten(2, 3)
        assert strided.placements != (Shard(2),)
        for at in (WHOLE, Shard(0)):
            y = rms_norm(strided, N, distribute_tensor(weight, mesh, [at]), EPS)
            assert torch.equal(y.full_tensor(), expected)


def rows_of_a_flattened_sequence(mesh) -> None:
    """(B, T, N) sharded by T and then (B * T, N): the shards lie in strides, and stay where they are."""
    if not processes.CAN_FLATTEN:
        return
    x, weight = torch.randn(B, 8, N, generator=torch.Generator().manual_seed(0)), torch.ones(N)
    expected = F.rms_norm(x, (N,), weight, EPS)
    rows = distribute_tensor(x, mesh, [Shard(1)]).flatten(0, 1)
    weight = distribute_tensor(weight, mesh, [WHOLE]).requires_grad_()
    with CommDebugMode() as communication:
        y = rms_norm(rows.detach().requires_grad_(), N, weight, EPS)
        y.backward(rows)
    assert y.placements == rows.placements != (WHOLE,)
    assert communication.get_total_counts() == 0
    assert torch.equal(y.full_tensor(), expected.flatten(0, 1))


def fewer_rows_than_processes(mesh) -> None:
    """They stay where they are if F.rms_norm leaves them there: no process is sent the others' rows. Else each of x, dy
    and what is saved, and with a residual one more, is gathered once; F.rms_norm gathers six times."""
    grid = init_device_mesh("cpu", (2, 2))
    for one_mesh, placements in ((mesh, [Shard(0)]), (mesh, [Shard(1)]), (grid, [Shard(0), Shard(0)])):
        for of_heads in (False, True):
            given = learned(*tensors(3, 2, H, N, of_heads=of_heads))
            for is_block in (True, False):
                expected = step(given, N, is_block, backend="torch")
                replicated = [WHOLE] * len(placements)
                places = placements, placements, replicated, replicated, placements, placements
                placed = processes.placed(given, one_mesh, places)
                with CommDebugMode() as communication:
                    found = step(placed, N, is_block)
                if KEEPS_ROWS:
                    assert communication.get_total_counts() == 0, communication.get_comm_counts()
                    assert found["y"].placements == found["dx"].placements == tuple(placements)
                elif GATHERS_ROWS:
                    assert communication.get_total_counts() <= 3 + is_block, communication.get_comm_counts()
                for name, result in whole(found).items():
                    if expected[name] is not None:
                        torch.testing.assert_close(result, expected[name], rtol=1e-5, atol=1e-5)


def fewer_rows_by_name(mesh) -> None:
    """A kernel that is asked for by name gathers the rows."""
    x, _, weight, _, _, _ = tensors(3, 2, N)
    placed = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [WHOLE])
    with pytest.MonkeyPatch.context() as patch:
        by_address.use(patch)
        y = rms_norm(placed[0], N, placed[1], EPS, backend="cutile")
        assert by_address.calls == ["rms_norm_forward"]
    torch.testing.assert_close(y.full_tensor(), F.rms_norm(x, (N,), weight, EPS))


def fewer_rows_beside_what_is_placed_otherwise(mesh) -> None:
    """PyTorch's norm of the sum raised an error where one of them was Partial, as a linear layer leaves it."""
    x, residual, weight, _, _, _ = tensors(3, 2, N)
    expected = rms_norm(x, N, weight, EPS, residual=residual, backend="torch")
    weight = distribute_tensor(weight, mesh, [WHOLE])

    def part(tensor):
        return DTensor.from_local((1 + dist.get_rank()) / 10 * tensor, mesh, [Partial()])

    def few(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    def run(x, residual):
        return rms_norm(x, N, weight, EPS, residual=residual)

    for given in ((part(x), few(residual)), (few(x), part(residual)), (few(x), few(residual))):
        torch._dynamo.reset()
        for norm in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
            for one, other in zip(norm(*given), expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-5, atol=1e-5)


def a_number_of_rows_that_is_not_known(mesh) -> None:
    """While Dynamo traces it, where F.rms_norm is traced too."""
    if not KEEPS_ROWS:
        return
    torch._dynamo.reset()
    x, _, weight, _, _, _ = tensors(8, N)
    placed = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [WHOLE])
    torch._dynamo.decorators.mark_unbacked(placed[0], 0)
    norm = torch.compile(lambda x, weight: rms_norm(x, N, weight, EPS), backend="aot_eager", fullgraph=True)
    y = norm(*placed)
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), F.rms_norm(x, (N,), weight, EPS))


def split_rows_and_a_residual_that_is_not(mesh) -> None:
    """Their sum is sharded as the residual, here unevenly: such rows PyTorch does not flatten."""
    x, residual, weight, _, _, _ = tensors(5, 3, N)
    expected = rms_norm(x, N, weight, EPS, residual=residual)
    places = (x, Shard(2)), (weight, WHOLE), (residual, Shard(0))
    x, weight, residual = (distribute_tensor(t, mesh, [at]) for t, at in places)
    for one, other in zip(rms_norm(x, N, weight, EPS, residual=residual), expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


def a_backend_in_effect(mesh) -> None:
    """By use_backend as by backend=: split rows are gathered. No backend of a name is an error of ours."""
    x, _, weight, _, _, _ = tensors(B, T, N)
    placed = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(weight, mesh, [WHOLE])
    with pytest.MonkeyPatch.context() as patch, use_backend("cutile"):
        by_address.use(patch)
        y = rms_norm(placed[0], N, placed[1], EPS)
        assert by_address.calls == ["rms_norm_forward"]
    torch.testing.assert_close(y.full_tensor(), F.rms_norm(x, (N,), weight, EPS))
    with pytest.raises(ValueError, match="backend: expected one of"):
        rms_norm(placed[0], N, placed[1], EPS, backend="none")


def kernels_read_local_memory(mesh) -> None:
    """By "auto" as on a GPU, and by name: in the forward and the backward, one launch a process that has rows."""
    given = tensors(B, T, N)
    x, weight, dy = given[0], given[2], given[4]
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rms_norm(leaves[0], N, leaves[1], EPS, backend="torch").backward(dy)
    with pytest.MonkeyPatch.context() as patch:
        by_address.use(patch)
        for backend in (None, "auto", "cutile"):
            by_address.calls.clear()
            places = (x, Shard(1)), (weight, WHOLE)
            placed = [distribute_tensor(t, mesh, [at]).requires_grad_() for t, at in places]
            rms_norm(placed[0], N, placed[1], EPS, backend=backend).backward(
                distribute_tensor(dy, mesh, [Shard(1)])
            )
            has_rows = placed[0].to_local().numel() != 0
            assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"] * has_rows
            for one, other in zip(placed, leaves, strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def a_plain_weight(mesh) -> None:
    """Refused as F.rms_norm refuses it, and taken for replicated where PyTorch is told so."""
    x, _, weight, _, _, _ = tensors(B, T, N)
    placed = distribute_tensor(x, mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        F.rms_norm(placed, (N,), weight, EPS)
    with pytest.raises(TypeError, match="^weight: expected a DTensor as input is, got a plain tensor"):
        rms_norm(placed, (N,), weight, EPS)
    with implicit_replication():
        y = rms_norm(placed, (N,), weight, EPS)
    assert y.placements == (Shard(1),) and torch.equal(y.full_tensor(), F.rms_norm(x, (N,), weight, EPS))


def gradients_of_gradients(mesh) -> None:
    x, residual, weight, _, dy, _ = (t.double() for t in tensors(B, T, N))
    for has_residual in (False, True):

        def run(place, has_residual=has_residual, **options):
            leaves = [place(x, Shard(1)), place(weight, WHOLE)]
            leaves += [place(residual, Shard(1))] if has_residual else []
            leaves = [t.detach().requires_grad_() for t in leaves]
            options |= {"residual": leaves[2], "residual_alpha": 0.5} if has_residual else {}
            results = rms_norm(leaves[0], N, leaves[1], EPS, **options)
            y, *others = results if has_residual else (results,)
            given = [place(dy, Shard(1)), *(place(dy.cos(), Shard(1)) for _ in others)]
            first = torch.autograd.grad((y, *others), leaves, given, create_graph=True)
            return *first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

        expected = run(lambda t, _: t, backend="torch")
        found = run(lambda t, at: distribute_tensor(t, mesh, [at]))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


def a_gradient_that_can_be_differentiated(mesh) -> None:
    """It is as exact as one that cannot: what was normalized is narrower than x, whose gradient is not rounded."""
    x, residual, weight, _, dy, d_residual_out = tensors(B, T, N)
    whole_rows = (x, residual.bfloat16(), dy, d_residual_out.bfloat16())
    placed = [distribute_tensor(t, mesh, [Shard(1)]) for t in whole_rows]
    weight = distribute_tensor(weight, mesh, [WHOLE]).requires_grad_()
    found = []
    for create_graph in (False, True):
        leaves = [t.detach().requires_grad_() for t in placed[:2]]
        options = {"residual": leaves[1], "residual_alpha": 0.3, "residual_dtype": torch.bfloat16}
        results = rms_norm(leaves[0], N, weight, EPS, **options)
        given = [*leaves, weight]
        found.append(torch.autograd.grad(results, given, placed[2:], create_graph=create_graph))
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        limit = 1e-5 if one.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(one.full_tensor(), other.full_tensor().detach(), rtol=limit, atol=limit)


def gradient_of_the_gradient_of_bias(mesh) -> None:
    """Where bias alone is learned, and the gradient is differentiated."""
    for has_residual in (False, True):
        x, residual, _, bias, dy, _ = (distribute_tensor(t, mesh, [WHOLE]) for t in tensors(B, T, N))
        bias, dy = bias.requires_grad_(), dy.requires_grad_()
        results = rms_norm(x, N, None, EPS, bias=bias, residual=residual if has_residual else None)
        y = results[0] if has_residual else results
        (db,) = torch.autograd.grad(y, bias, dy, create_graph=True)
        (ddy,) = torch.autograd.grad(db.square().sum(), dy)
        torch.testing.assert_close(ddy.full_tensor(), (2 * db).full_tensor().expand(dy.shape))


def in_one_graph(mesh) -> None:
    """The op stands in it for local tensors, in Dynamo's and in make_fx's."""
    x, _, weight, _, _, _ = tensors(B, 8, N)
    placed = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [WHOLE])
    expected = [each.clone().requires_grad_() for each in (x, weight)]
    rms_norm(expected[0], N, expected[1], EPS, backend="torch").sin().sum().backward()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, weight: rms_norm(x, N, weight, EPS).sin(),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
    )
    leaves = [t.detach().requires_grad_() for t in placed]
    compiled(*leaves).sum().backward()
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == 1, targets
    given_backends = [
        node.args[-1] for graph in graphs for node in graph.graph.nodes if node.target == BACKWARD
    ]
    assert given_backends == [None]  # the one in effect when the graph runs
    for one, other in zip(leaves, expected, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    traced = make_fx(lambda x, weight: rms_norm(x, N, weight, EPS).to_local())(*placed)
    targets = [node.target for node in traced.graph.nodes]
    assert FORWARD in targets, targets


def a_module_that_was_distributed(mesh) -> None:
    """As `distribute_module` leaves it: all parameters replicated; with a residual, a bias and heads."""
    from torch.distributed.tensor import distribute_module

    torch.manual_seed(0)
    norm = RMSNorm(N, heads=H, bias=True, residual_alpha=0.5)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, residual = torch.randn(B, T, H, N), torch.randn(B, T, H, N)
    y, residual_out = norm(x, residual)
    gradients = torch.autograd.grad(y.sin().sum() + residual_out.cos().sum(), list(norm.parameters()))
    distribute_module(norm, mesh)
    got = norm(*(distribute_tensor(t, mesh, [Shard(1)]) for t in (x, residual)))
    for one, other in zip(got, (y, residual_out), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    (got[0].sin().sum() + got[1].cos().sum()).backward()
    for parameter, gradient in zip(norm.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    processes.run_cases(globals(), compiles=True)
