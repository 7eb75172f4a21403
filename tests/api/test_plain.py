# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Plain tensors: the three places that ask for them without the longer checks must give one answer. Tensors whose data
is elsewhere, or nowhere, are none: kernels would be launched on address 0."""

import contextlib

import by_address
import pytest
import torch
from every_op import assert_same_bits, each_op, note_backends, note_unknown
from gate_cases import Named, freed, freed_view
from helpers import HAS_GPU, settle_interpreters
from processes import mesh_of_one
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilegym_rmsnorm import (
    BackendUnavailableError,
    override_aten,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    use_backend,
)
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.call import tensors as call_tensors
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.ops.norm import checks, passes
from tilegym_rmsnorm.ops.norm.eager import _are_as_saved
from tilegym_rmsnorm.ops.norm.op import KNOWN_FORWARDS
from tilegym_rmsnorm.ops.norm.spec import Spec
from tilegym_rmsnorm.routes import choose, known_calls

# The same values, but not at the addresses of the tensor; and zeros without an address
ELSEWHERE = {"negated": lambda t: torch._neg_view(-t), "zeros": lambda t: torch._efficientzerotensor(t.shape)}


@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
@each_op
def test_backends_get_plain_memory(op, change, by_op, monkeypatch):
    """In both passes, whichever tensor of the caller, or gradient, is none."""
    call = op.make(op.alike)
    given, shown = {**call.leaves, **call.fixed}, []
    ran = note_backends(monkeypatch, shown.extend)
    for index in range(len(given) + len(call.dys)):
        found = []
        for other in (change, lambda t: change(t) + 0.0):  # the second has memory of its own
            tensors = [*given.values(), *call.dys]
            if tensors[index].is_floating_point():
                tensors[index] = other(tensors[index])
            leaves = [each.detach().requires_grad_() for each in tensors[: len(call.leaves)]]
            fixed = tensors[len(call.leaves) : len(given)]
            results = (call.by_op if by_op else call.public)(*leaves, *fixed, backend="cutile")
            found.append([*results, *torch.autograd.grad(results, leaves, tensors[len(given) :])])
        assert_same_bits(*found)
    assert set(ran) == {"cutile"}
    assert all(call_tensors.is_plain(each) for each in shown if each is not None)


M, N = 3, 8
X, W, R = torch.randn(M, N), torch.rand(N) + 0.5, torch.randn(M, N)


def kept_from_a_transform(tensor):
    kept = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(tensor.clone())
    return kept[0]


def batched(tensor):
    level = torch._C._functorch._vmap_increment_nesting(1, "error")
    try:
        return torch._C._functorch._add_batch_dim(tensor[None], 0, level)
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def waiting(tensor):
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    return collectives.AsyncCollectiveTensor(tensor.clone())


PLAIN = {
    "new": lambda t: t.clone(),
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "with an offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "an output of autograd": lambda t: t.clone().requires_grad_() * 1,
}
NOT_PLAIN = {
    "a subclass": lambda t: t.as_subclass(Named),
    "a minus sign": lambda t: torch._neg_view(-t),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
    "functional": torch._to_functional_tensor,
    "of torch.func": kept_from_a_transform,
    "of vmap": batched,
    "freed": freed,
    "a view of freed memory": freed_view,
    "on no device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "being communicated": waiting,
    "no rows": lambda t: t[:0],
}


def is_known(describe, tensors, index, make):
    """Whether a call with `make`'s tensor at `index` is known, once a call of plain tensors is, and once a call like it
    is if that tensor is plain."""
    calls = known_calls.KnownCalls()
    calls.remember(describe(*tensors), print)
    tensors = [*tensors[:index], make(tensors[index]), *tensors[index + 1 :]]
    call = describe(*tensors)
    if call is not None and all(map(call_tensors.is_plain, tensors)):
        calls.remember(call, print)
    return calls.find(describe(*tensors)) is print


def answers(make):
    """Ask each place about a tensor given as each argument that may be one."""
    numbers = (N,), 1e-6, 0.0, "once", 1.0, None, None
    given = {"x": X, "dy": R, "weight": W, "rstd": torch.ones(M), "d_residual_out": X + R}
    call = Call(Spec(N, 1e-6, 0.0, "once"), "torch", dtype=X.dtype)
    fit = [_are_as_saved(tuple({**given, name: make(each)}.values()), call) for name, each in given.items()]
    known = [
        is_known(lambda x, w, r: passes.norm_call((x, w, None, r), numbers, "torch"), (X, W, R), i, make)
        for i in range(3)
    ]
    backward = lambda *tensors: passes.backward_call(tensors, (), "torch")  # noqa: E731
    known += [is_known(backward, tuple(given.values()), i, make) for i in range(5)]
    plain = [call_tensors.is_plain(make(tensor)) for tensor in given.values()]
    return plain, fit, known


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_no_place_takes_them(make):
    assert answers(make) == ([False] * 5, [False] * 5, [False] * 8)


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_every_place_takes_them(make):
    plain, fit, known = answers(make)
    # A kernel reads rstd as packed: one of other strides is copied first, on the longer way.
    fits = [*fit[:3], fit[4]]
    assert (plain, fits, known) == ([True] * 5, [True] * 4, [True] * 8)
    assert fit[3] == make(torch.ones(M)).is_contiguous()


def test_an_address_below_all_memory_is_compared_with_the_offset(monkeypatch):
    """Such as a heap has where programs are loaded at low addresses: the answer is the same."""
    monkeypatch.setattr(call_tensors, "TEBIBYTE", 2**63)
    for make in (PLAIN["new"], PLAIN["with an offset"]):
        assert call_tensors.is_plain(make(X))
    for make in (freed, freed_view):
        assert not call_tensors.is_plain(make(X))


def test_what_has_no_obstacle():
    tensors = {"a": X, "b": None, "c": torch.nn.Parameter(W), "d": X.as_subclass(Named), "e": X[:, ::2]}
    assert choose._obstacle_of({**tensors, "f": X.expand(2, M, N)}) is None


ABOVE_ATEN = "of torch.func", "of vmap", "sparse"  # the dispatcher hands these to other kernels


def route_name(x, weight):
    """Return None for an error."""
    try:
        checked = checks.checked_forward(x, weight, None, None, (N,), 1e-6, 0.0, "once", 1.0, None, None)
        return choose.route_of(checked, "cutile").name
    except (TypeError, ValueError, BackendUnavailableError):
        return None


@pytest.mark.skipif(HAS_GPU, reason="the backend that takes the calls reads a CPU's addresses")
@pytest.mark.parametrize("kind", [kind for kind in (*PLAIN, *NOT_PLAIN) if kind not in ABOVE_ATEN])
def test_the_override_of_aten_agrees_with_the_route(kind, monkeypatch):
    """The override asks tensors itself, since it declines most calls: one that it takes is for kernels, and of plain
    tensors it takes all. Those that can be made plain it leaves to aten."""
    by_address.use(monkeypatch)
    make = {**PLAIN, **NOT_PLAIN}[kind]
    with use_backend("cutile"), override_aten("cpu") as override:
        for x, weight in ((make(X), W), (X, make(W))):
            found = override._patch._implementation("rms_norm_forward", x, [N], weight)
            is_taken = not isinstance(found, str)
            assert is_taken == (kind in PLAIN)
            assert not is_taken or route_name(x, weight) == choose.KERNELS


ROWS, WEIGHT = torch.randn(3, 8), torch.rand(8) + 0.5
KERNELS = ("cutile", "triton")


@pytest.fixture
def every_kernel_by_auto(monkeypatch):
    """Let "auto" take kernels for what they can run, as on a GPU."""
    settle_interpreters(monkeypatch)
    for backend in KERNELS:
        monkeypatch.setattr(registry._probe(backend), "interpreting", lambda: True)


@contextlib.contextmanager
def dtensors():
    from torch.distributed.tensor import Replicate, distribute_tensor

    with mesh_of_one() as mesh:
        yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])


@contextlib.contextmanager
def fakes():
    with FakeTensorMode() as mode:
        yield mode.from_tensor


@pytest.mark.parametrize("is_known", [False, True])
@each_op
def test_freed_memory_is_refused(op, is_known, monkeypatch):
    """A call like an earlier one skips all other checks."""
    with torch.no_grad():
        for name in (first := op.make(op.alike)).leaves | first.fixed:
            call = op.make(op.alike, seed=1)
            known_calls.forget()
            if is_known:
                call.public(*call.tensors, backend="torch")
                with monkeypatch.context() as patch:
                    unknown = note_unknown(op, patch)
                    first.public(*first.tensors, backend="torch")
                    assert not unknown
            (call.leaves | call.fixed)[name].untyped_storage().resize_(0)
            with pytest.raises(ValueError, match=f"^{name}: expected memory behind its elements"):
                call.public(*call.tensors, backend="torch")


@pytest.mark.parametrize("backend", (*KERNELS, "auto"))
def test_plain_tensors_beside_dtensors_are_refused(backend):
    """An error names the plain tensor, before a kernel."""
    rstd = torch.rand(3)
    with dtensors() as stand_in:
        attempts = (
            lambda: rms_norm_forward(stand_in(ROWS), WEIGHT, backend=backend),
            lambda: rms_norm_backward(ROWS, stand_in(ROWS), WEIGHT, rstd, backend=backend),
            lambda: rms_norm_backward(ROWS, ROWS, WEIGHT, stand_in(rstd), backend=backend),
        )
        for attempt in attempts:
            with pytest.raises(
                TypeError, match="^[a-z]+: expected a DTensor as [a-z]+ is, got a plain tensor"
            ):
                attempt()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_dtensor_inside_of_torch_func_is_refused_by_name(backend):
    with dtensors() as stand_in:
        x = stand_in(ROWS)
        with pytest.raises(BackendUnavailableError, match="torch.func transforms this call"):
            torch.func.grad(lambda x: rms_norm(x, 8, backend=backend).sum().to_local())(x)


@pytest.mark.parametrize("backend", (*KERNELS, "auto"))
def test_fake_tensors_give_fake_results(backend):
    with fakes() as fake:
        x, weight, rstd = fake(ROWS), fake(WEIGHT), fake(torch.rand(3))
        y = rms_norm(x, (8,), weight, backend=backend)
        *results, of_forward = rms_norm_forward(x, None, backend=backend)
        gradients = rms_norm_backward(x, x, weight, rstd, needs_db=True, backend=backend)
    assert [tuple(each.shape) for each in (y, *results, *gradients)] == [(3, 8)] * 3 + [(8,)] * 2
    assert of_forward.shape == (3,) and isinstance(y, FakeTensor) and isinstance(gradients[1], FakeTensor)


def test_auto_takes_dtensors_that_are_sharded_in_the_middle(every_kernel_by_auto):
    """Sequence parallelism shards so."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight = torch.randn(2, 4, 8), WEIGHT.clone().requires_grad_()
    expected = rms_norm(x, (8,), weight, backend="auto")
    expected.sum().backward()
    with dtensors() as distribute:
        replicated = distribute(WEIGHT).requires_grad_()
        y = rms_norm(
            distribute_tensor(x, replicated.device_mesh, [Shard(1)]), (8,), replicated, backend="auto"
        )
        y.sum().backward()
        assert y.placements == (Shard(1),) and torch.equal(y.full_tensor(), expected)
        torch.testing.assert_close(replicated.grad.full_tensor(), weight.grad)


def test_auto_takes_what_local_tensors_get_for_dtensors(every_kernel_by_auto):
    expected = rms_norm(ROWS, (8,), WEIGHT, backend="auto")
    with dtensors() as stand_in:
        y = rms_norm(stand_in(ROWS), (8,), stand_in(WEIGHT), backend="auto")
        assert torch.equal(y.full_tensor(), expected)


def test_auto_takes_no_kernel_for_fake_tensors(every_kernel_by_auto):
    with fakes() as stand_in:
        assert rms_norm(stand_in(ROWS), (8,), stand_in(WEIGHT), backend="auto").shape == ROWS.shape


def test_what_auto_takes_for_them_is_not_what_others_get(every_kernel_by_auto):
    """One call under vmap would leave all later ones like it to the reference."""
    torch.func.vmap(lambda row: rms_norm(row, (8,), WEIGHT, backend="auto"))(ROWS)
    with fakes() as stand_in:
        rms_norm(stand_in(ROWS), (8,), stand_in(WEIGHT), backend="auto")
    assert not passes.KNOWN._kinds and not KNOWN_FORWARDS._kinds


@pytest.mark.parametrize("backend", ("torch", "auto"))
def test_a_fake_gradient_for_a_bias_alone(backend):
    """The saved tensors are real, and FakeTensorMode refuses operations on those."""
    bias = torch.zeros(8, requires_grad=True)
    y = rms_norm(ROWS, (8,), WEIGHT, bias=bias, backend=backend)
    with fakes() as stand_in:
        assert torch.autograd.grad(y, bias, stand_in(ROWS))[0].shape == (8,)
