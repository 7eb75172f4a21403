# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""In front of every kernel: tensors that are no plain memory are made plain, or the kernel is not launched; calls that
PyTorch records, transforms or watches are recorded, or seen by nobody; saved tensors change before the backward.

Each ended in a wrong result, a dead CUDA context, a graph into which the call was burnt, or an error that F.rms_norm
does not have. Fixtures as in gate_cases.py."""

from concurrent.futures import ThreadPoolExecutor

import by_address
import pytest
import torch
from gate_cases import (
    CPU,
    M,
    N,
    Named,
    check,
    freed,
    freed_minus,
    freed_view,
    gradients_of_theirs,
    make_tensors,
    theirs,
    unwrapped,
)
from helpers import DEVICE
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import (
    BackendUnavailableError,
    compute_rms_norm_rstd_torch,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_torch,
    rms_norm_forward,
    use_backend,
)
from tilegym_rmsnorm.routes import choose


class Scattered(torch.autograd.Function):
    """A hand-written gather, as tensor parallelism has it: its backward returns what a collective will write."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(dy.clone())


needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


@needs_distributed
def test_a_gradient_that_is_still_communicated(asked_for, tensors):
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(Scattered.apply(y), (x, weight), dy), gradients_of_theirs(x, weight, dy))


def test_a_gradient_from_reduce_scatter(asked_for, tensors, mesh):
    """The collective itself runs where the process group has it."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    x, weight, dy = tensors
    if not x.is_cpu:
        pytest.skip("the process group is of CPUs")

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return collectives.all_gather_tensor(y, 0, dist.group.WORLD).clone()

        @staticmethod
        def backward(ctx, dy):
            scattered = collectives.reduce_scatter_tensor(dy, "sum", 0, dist.group.WORLD)
            assert isinstance(scattered, collectives.AsyncCollectiveTensor)
            return scattered

    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(Gather.apply(y), (x, weight), dy), gradients_of_theirs(x, weight, dy))


@needs_distributed
@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_input_that_is_still_communicated(asked_for, tensors, needs_grad):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    x, weight, dy = tensors
    waiting = AsyncCollectiveTensor(x.detach().clone()).requires_grad_(needs_grad)
    y = rms_norm(waiting, (N,), weight, 1e-6, backend=asked_for)
    assert type(y) is torch.Tensor
    check([y], [theirs(x, weight)])
    wanted = (waiting, weight) if needs_grad else (weight,)
    check(torch.autograd.grad(y, wanted, dy), gradients_of_theirs(x, weight, dy)[-len(wanted) :])
    check([rms_norm_forward(waiting, weight, 1e-6, backend=asked_for)[0]], [theirs(x, weight)])


def test_a_gradient_without_memory(asked_for, tensors):
    x, weight, _ = tensors
    zero = torch._efficientzerotensor(x.shape, device=x.device)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(y, (x, weight), zero), (torch.zeros_like(x), torch.zeros_like(weight)))


@pytest.mark.parametrize("is_known", [False, True])
def test_zeros_without_memory(asked_for, tensors, is_known):
    x, weight, dy = tensors
    zero = torch._efficientzerotensor(x.shape, device=x.device)
    zero_weight = torch._efficientzerotensor(weight.shape, device=x.device)
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    for arguments in ((zero, weight), (x, zero_weight), (zero, None)):
        y = rms_norm(arguments[0], (N,), arguments[1], 1e-6, backend=asked_for)
        assert torch.equal(y, torch.zeros_like(x))
    leaf = torch._efficientzerotensor(x.shape, device=x.device).requires_grad_()
    y = rms_norm(leaf, (N,), weight, 1.0, backend=asked_for)
    check(torch.autograd.grad(y, leaf, dy), [dy * weight])


@pytest.mark.parametrize("is_known", [False, True])
def test_a_pending_minus_sign(asked_for, tensors, is_known):
    x, weight, dy = tensors
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    minus = [torch._neg_view(-tensor.detach()).requires_grad_() for tensor in tensors]
    assert all(tensor.is_neg() for tensor in minus)
    expected, expected_grads = theirs(x, weight), gradients_of_theirs(x, weight, dy)
    for arguments in ((minus[0], weight, dy), (x, minus[1], dy), (x, weight, minus[2].detach()), minus):
        for needs_grad in (True, False) * 2:  # no such call is known afterwards
            with torch.set_grad_enabled(needs_grad):
                y = rms_norm(*(arguments[0], (N,), arguments[1], 1e-6), backend=asked_for)
            check([y], [expected])
            if needs_grad:
                check(torch.autograd.grad(y, arguments[:2], arguments[2]), expected_grads)
    with torch.no_grad():
        _, rstd = rms_norm_forward(minus[0], minus[1], 1e-6, backend=asked_for)
        got = rms_norm_backward(minus[0], minus[2], minus[1], torch._neg_view(-rstd), backend=asked_for)
    check(got, expected_grads)


def test_gradients_mapped_by_vmap(asked_for, tensors):
    """PyTorch's documented pattern for Jacobians."""
    x, weight, _ = tensors
    dys = torch.randn(3, M, N, device=x.device)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    for wanted in ((x,), (x, weight)):
        got = torch.vmap(lambda dy, wanted=wanted: torch.autograd.grad(y, wanted, dy, retain_graph=True))(dys)
        each = [torch.autograd.grad(theirs(x, weight), wanted, dy) for dy in dys]
        check(got, [torch.stack(parts) for parts in zip(*each, strict=True)])
    (got,) = torch.autograd.grad(y, x, dys, is_grads_batched=True)
    check(got, [torch.autograd.grad(theirs(x, weight), x, dy)[0] for dy in dys])


def test_gradients_asked_for_inside_a_transform(asked_for, tensors):
    """The transform does not touch the one dy."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    expected = gradients_of_theirs(x, weight, dy)

    def scaled(factor):
        return [each * factor for each in torch.autograd.grad(y, (x, weight), dy, retain_graph=True)]

    got = torch.vmap(scaled)(torch.tensor([1.0, 2.0], device=x.device))
    check(got, [torch.stack([each, each * 2]) for each in expected])


def test_freed_memory_is_an_error_in_the_forward(asked_for, tensors):
    """FSDP frees parameters between uses; the process ended."""
    x, weight, dy = (tensor.detach() for tensor in tensors)
    for make in (freed, freed_view, freed_minus, freed, freed_view):
        for arguments, name in (((make(x), weight), "input"), ((x, make(weight)), "weight")):
            with pytest.raises(
                ValueError, match=f"{name}: expected memory behind its elements, got a storage of 0"
            ):
                rms_norm(*(arguments[0], (N,), arguments[1]), backend=asked_for)
        rms_norm(x, (N,), weight, backend=asked_for)
    for make in (freed, freed_view, freed_minus):
        with pytest.raises(ValueError, match="input: expected memory"):
            torch.func.grad(lambda t: rms_norm(t, (N,), weight, backend="torch").sum())(make(x))
        with pytest.raises(ValueError, match="weight: expected memory"):
            torch.func.grad(lambda w: rms_norm(x, (N,), w, backend="torch").sum())(make(weight))
        with pytest.raises(ValueError, match="x: expected memory"):
            rms_norm_backward_torch(make(x), dy, weight, torch.ones(M, device=x.device))
        with pytest.raises(ValueError, match="x: expected memory"):
            compute_rms_norm_rstd_torch(make(x))
    with pytest.raises(ValueError, match="dy: expected memory"):
        rms_norm_backward(x, freed(dy), weight, torch.ones(M, device=x.device), backend=asked_for)


def test_a_tensor_kept_from_inside_a_transform(asked_for, tensors):
    x, weight, dy = tensors
    kept = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x.detach())
    for grad_mode in (torch.no_grad, torch.enable_grad):
        with grad_mode():
            check([rms_norm(kept[0], (N,), weight, 1e-6, backend=asked_for)], [theirs(x, weight)])
    check([rms_norm_forward(kept[0], weight, 1e-6, backend=asked_for)[0]], [theirs(x, weight)])
    nested = []
    torch.func.grad(lambda t: torch.func.grad(lambda t: (nested.append(t), t.square().sum())[1])(t).sum())(
        x.detach()
    )
    check([rms_norm(nested[0], (N,), weight, 1e-6, backend=asked_for)], [theirs(x, weight)])
    got = torch.autograd.grad(rms_norm(kept[0], (N,), weight, 1e-6, backend=asked_for), weight, dy)
    check(got, gradients_of_theirs(x, weight, dy)[1:])


@pytest.mark.parametrize("is_known", [False, True])
def test_functional_tensors(asked_for, tensors, is_known):
    """Functional tensors without their mode killed the CUDA context."""
    x, weight, dy = tensors
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    functional = torch._to_functional_tensor(x.detach())
    attempts = (
        lambda: rms_norm(functional, (N,), weight, 1e-6, backend=asked_for),
        lambda: rms_norm_forward(functional, weight, 1e-6, backend=asked_for)[0],
    )
    for attempt in attempts:
        if asked_for != "auto":
            with pytest.raises(BackendUnavailableError, match="functional tensor"):
                attempt()
        else:
            check([unwrapped(attempt())], [theirs(x, weight)])
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    functional_dy = torch._to_functional_tensor(dy)
    if asked_for != "auto":
        with pytest.raises(BackendUnavailableError, match="dy is a functional tensor"):
            torch.autograd.grad(y, x, functional_dy)
    else:
        got = torch.autograd.grad(y, (x, weight), functional_dy)
        check([unwrapped(gradient) for gradient in got], gradients_of_theirs(x, weight, dy))


@pytest.mark.parametrize("is_known", [False, True])
def test_functionalization_by_hand(asked_for, tensors, is_known):
    """A call of a known kind launched a kernel on address 0."""
    x, weight, _ = (tensor.detach() for tensor in tensors)
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    torch._enable_functionalization(reapply_views=True)
    try:
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    finally:
        torch._disable_functionalization()
    check([unwrapped(y) if torch._is_functional_tensor(y) else y], [theirs(x, weight)])


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_functional_mode_by_itself(request, asked_for, tensors, has_residual):
    """AOTAutograd does not trace: the op below the mode computes. A kernel was refused there; "auto" did without."""
    x, weight, dy = tensors
    with FunctionalTensorMode():
        functional = [FunctionalTensor.to_functional(each.detach()) for each in (x, weight, dy)]
        leaves = [each.requires_grad_() for each in functional[:2]]
        residual = functional[2] if has_residual else None
        y = rms_norm(leaves[0], (N,), leaves[1], 1e-6, residual=residual, backend=asked_for)
        y = y[0] if has_residual else y
        gradients = torch.autograd.grad(y, leaves, functional[2])
        got = [unwrapped(each.elem) for each in (y.detach(), *gradients)]
    if "by address" in request.node.callspec.id:
        assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]
    leaves = [(x + dy if has_residual else x).detach().requires_grad_(), weight]
    check(got[:1], [theirs(*leaves)])
    check(got[1:], gradients_of_theirs(*leaves, dy))


def test_a_sparse_gradient_is_named(asked_for, tensors):
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with pytest.raises(TypeError, match="dy: expected layout torch.strided, got torch.sparse_coo"):
        torch.autograd.grad(y, (x, weight), dy.to_sparse())


def ops_of(graph):
    """The names of this package's ops in a graph."""
    return [node.target.name().split("::")[1] for node in graph.graph.nodes if "tilegym" in str(node.target)]


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_make_fx_records_the_norm(asked_for, tensors, tracing_mode, pre_dispatch, is_known):
    """Any kernel is recorded as an op. With real tensors the first y was a constant of the graph."""
    x, weight = (tensor.detach() for tensor in tensors[:2])
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)

    def doubled(t):
        return rms_norm(t, (N,), weight, 1e-6, backend=asked_for) * 2

    options = {"tracing_mode": tracing_mode, "pre_dispatch": pre_dispatch, "_allow_non_fake_inputs": True}
    by_address.calls.clear()
    graph = make_fx(doubled, **options)(x)
    assert ops_of(graph) == ["rms_norm_forward"]
    assert tracing_mode == "real" or not by_address.calls, "launched on tensors without memory"
    other = torch.randn_like(x)
    check([graph(other)], [theirs(other, weight) * 2])


def test_real_tensors_in_a_fake_mode(asked_for, tensors):
    """A kernel's outputs have no memory there."""
    x, weight, dy = tensors
    rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    by_address.calls.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = rms_norm(x, (N,), weight, 1e-6, backend=asked_for), *torch.autograd.grad(y, x, dy)
        for result in results:
            assert isinstance(result, FakeTensor) and result.shape == x.shape
    assert not by_address.calls


class Silent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Wrapping(TorchDispatchMode):
    """Gives every new tensor a subclass, whose own address is 0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return tree_map_only(
            torch.Tensor, lambda t: t if isinstance(t, TwoTensor) else TwoTensor(t, t), result
        )


MODES = {
    "flop counter": lambda: FlopCounterMode(display=False),
    "saved tensors that may change": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "silent": Silent,
    "wrapping": Wrapping,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("is_known", [False, True])
def test_modes_that_watch(asked_for, tensors, mode, is_known):
    x, weight, dy = tensors
    expected = (theirs(x, weight), *gradients_of_theirs(x, weight, dy))
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with mode():
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
        got = (y, *torch.autograd.grad(y, (x, weight), dy))
    check([getattr(t, "a", t).detach() for t in got], expected)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check((y, *torch.autograd.grad(y, (x, weight), dy)), expected)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with mode():
        got = torch.autograd.grad(y, (x, weight), dy)
    check([getattr(t, "a", t) for t in got], expected[1:])


LAYOUTS = {  # of x and dy; a kernel is given rows, which are made of them
    "three dimensions": lambda t: t.view(2, M // 2, N).clone(),
    "columns first": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: torch.stack([t, t * torch.nan], dim=-1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_modes_that_watch_see_no_tensor_of_a_kernel(asked_for, tensors, mode, layout, has_residual):
    """The rows, and the sum with a residual, were made where a mode put other tensors in their place: address 0."""
    x, weight, dy = tensors
    residual = torch.randn_like(dy) if has_residual else torch.zeros_like(dy)
    leaf = (x.detach() + residual).requires_grad_()
    expected = (theirs(leaf, weight), *gradients_of_theirs(leaf, weight, dy))
    x, dy, residual = layout(x.detach()).requires_grad_(), layout(dy), layout(residual)

    def results():
        y = rms_norm(x, (N,), weight, 1e-6, residual=residual if has_residual else None, backend=asked_for)
        y = y[0] if has_residual else y
        return y, *torch.autograd.grad(y, (x, weight), dy)

    for _ in range(2):
        with mode():
            got = results()
        got = [getattr(each, "a", each).detach() for each in got]
        check([got[0].reshape(M, N), got[1].reshape(M, N), got[2]], expected)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing(asked_for, tensors, policy):
    x, weight, dy = tensors

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    def block(x):
        return rms_norm(x * 1.5, (N,), weight, 1e-6, backend=asked_for).sin()

    expected = torch.autograd.grad(theirs(x * 1.5, weight).sin(), (x, weight), dy)
    for _ in range(2):
        y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        check(torch.autograd.grad(y, (x, weight), dy), expected)


def test_a_backend_in_effect_when_the_forward_ran_serves_the_backward_in_any_thread(monkeypatch):
    """Context variables do not reach autograd's threads."""
    by_address.use(monkeypatch)
    x, weight, dy = make_tensors(CPU)
    with use_backend("cutile"):
        y = rms_norm(x, (N,), weight, 1e-6)
    functional, expected = torch._to_functional_tensor(dy), gradients_of_theirs(x, weight, dy)

    def backward():
        by_address.calls.clear()
        check(torch.autograd.grad(y, (x, weight), dy, retain_graph=True), expected)
        assert by_address.calls == ["rms_norm_backward"]
        with pytest.raises(BackendUnavailableError, match="'cutile' was asked for"):
            torch.autograd.grad(y, x, functional, retain_graph=True)

    with use_backend("torch"), ThreadPoolExecutor() as pool:
        backward()
        pool.submit(backward).result()


def test_the_log_says_once_why_an_op_replaces_a_call(caplog, monkeypatch, tensors):
    monkeypatch.setattr(choose, "_told", set())
    x, weight = tensors[:2]
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        for _ in range(2):
            with FlopCounterMode(display=False):
                rms_norm(x.detach(), N, weight)
            make_fx(lambda x: rms_norm(x, N, weight))(x.detach())
    found = [r.getMessage().split("replaces a call, since ") for r in caplog.records if "replaces" in r.msg]
    assert found == [
        ["op tilegym_rmsnorm::rms_norm_forward ", reason]
        for reason in ("a dispatch mode sees this call", "make_fx records this call")
    ]


UNPACKED = {  # what a hook makes of each saved tensor; the values are the same
    "other strides": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], dim=-1)[..., 0],
    "columns first": lambda t: t.t().contiguous().t() if t.ndim == 2 else t,
    "a minus sign of x": lambda t: torch._neg_view(-t) if t.ndim == 2 else t,
    "a minus sign of the others": lambda t: t if t.ndim == 2 or t.shape == (N,) else torch._neg_view(-t),
    "an offset": lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),
    "a subclass": lambda t: t.as_subclass(Named),
    "another copy": lambda t: t.clone(),
}


@pytest.mark.parametrize("unpack", UNPACKED.values(), ids=UNPACKED)
def test_what_hooks_of_saved_tensors_return(asked_for, tensors, unpack):
    """rstd with other strides was read as packed: NaN."""
    x, weight, dy = tensors
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(y, (x, weight), dy), gradients_of_theirs(x, weight, dy))


WRONG = {
    "x of another dtype": (
        0,
        lambda t: t.half(),
        TypeError,
        "x, as unpacked for the backward: .* dtype of the forward",
    ),
    "x shorter": (0, lambda t: t[1:], ValueError, "x, as unpacked for the backward: .* the shape of dy"),
    "weight longer": (1, lambda t: torch.cat([t, t]), ValueError, "weight, as unpacked .* 8 elements"),
    "weight elsewhere": (1, lambda t: t.to("meta"), ValueError, "weight, as unpacked .* the device of x"),
    "rstd shorter": (2, lambda t: t[1:], ValueError, r"rstd, as unpacked .* shape \(6,\)"),
    "rstd of 16 bits": (2, lambda t: t.bfloat16(), ValueError, "rstd, as unpacked .* torch.float32"),
    "rstd sparse": (2, lambda t: t.to_sparse(), ValueError, "rstd, as unpacked .* torch.strided"),
    "rstd freed": (2, lambda t: freed(t), ValueError, "rstd: expected memory behind its elements"),
    "x freed": (0, lambda t: freed(t), ValueError, "x: expected memory behind its elements"),
    "x a view of freed memory": (0, lambda t: freed_view(t), ValueError, "x: expected memory behind its"),
    "weight a view of freed memory": (1, lambda t: freed_view(t), ValueError, "weight: expected memory"),
}


def unpacked_by(index, unpack):
    """Hooks that change one saved tensor: x, weight or rstd."""
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())
        return len(saved) - 1

    def unpacked(number):
        return unpack(saved[number]) if number == index else saved[number]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpacked)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("index", "unpack", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_hooks_may_not_return(asked_for, tensors, index, unpack, error, text, create_graph):
    x, weight, dy = tensors
    with unpacked_by(index, unpack):
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with pytest.raises(error, match=text):
        torch.autograd.grad(y, (x, weight), dy, create_graph=create_graph)


def test_x_of_another_dtype_beside_a_y_of_that_dtype(backend):
    """Each of the others then fits x."""
    x, weight, dy = make_tensors(DEVICE)
    with unpacked_by(0, lambda t: t.float()):
        y = rms_norm(x.bfloat16(), (N,), weight, 1e-6, out_dtype=torch.float32, backend=backend)
    with pytest.raises(TypeError, match="x, as unpacked .* the dtype of the forward"):
        torch.autograd.grad(y, (x, weight), dy)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("index", "unpack"), [each[:2] for each in WRONG.values()], ids=WRONG)
def test_db_alone_reads_nothing_that_was_saved(asked_for, tensors, index, unpack, residual, create_graph):
    x, weight, dy = (each.detach() for each in tensors)
    bias = torch.randn(N, device=x.device, requires_grad=True)
    with unpacked_by(index, unpack):
        y = rms_norm(x, (N,), weight, 1e-6, bias=bias, residual=x if residual else None, backend=asked_for)
    y = y[0] if residual else y
    (db,) = torch.autograd.grad(y, bias, dy, create_graph=create_graph)
    check((db,), (dy.double().flatten(0, -2).sum(0).float(),))


CHANGED = {  # by `.data =`, which autograd's versions do not see: what F.rms_norm makes of it
    "weight shorter": (1, lambda t: t[:4].clone(), ValueError, "weight, as unpacked .* 8 elements"),
    "weight longer": (1, lambda t: torch.cat([t, t]), ValueError, "weight, as unpacked .* 8 elements"),
    "x longer": (0, lambda t: torch.cat([t, t]), ValueError, "x, as unpacked .* the shape of dy"),
    "x of another dtype": (0, lambda t: t.double(), TypeError, "x, as unpacked .* the dtype of the forward"),
    "x with a minus sign": (0, lambda t: torch._neg_view(-t), None, ""),
    "weight with a minus sign": (1, lambda t: torch._neg_view(-t), None, ""),
    "weight of other strides": (1, lambda t: torch.stack([t, t * torch.nan], -1)[:, 0], None, ""),
    "rstd of other strides": (2, lambda t: torch.stack([t, t * torch.nan], -1)[:, 0], None, ""),
    "rstd shorter": (2, lambda t: t[:2].clone(), ValueError, "rstd, as unpacked"),
    "rstd freed": (2, freed, ValueError, "rstd: expected memory behind its elements"),
}


@pytest.mark.parametrize(("index", "change", "error", "text"), CHANGED.values(), ids=CHANGED)
def test_data_changed_between_forward_and_backward(asked_for, tensors, index, change, error, text):
    x, weight, dy = tensors
    expected = gradients_of_theirs(x, weight, dy)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    tensor = y.grad_fn.saved_tensors[index]
    with torch.no_grad():
        tensor.data = change(tensor.detach())
    if error is None:
        check(torch.autograd.grad(y, (x, weight), dy), expected)
    else:
        with pytest.raises(error, match=text):
            torch.autograd.grad(y, (x, weight), dy)


def test_a_weight_made_double_after_the_forward(asked_for, tensors):
    """module.double() does so: no kernel is for that pair; "auto" has a backend that is."""
    x, weight, dy = tensors
    expected = gradients_of_theirs(x, weight, dy)[0]
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    weight.data = weight.data.double()
    if asked_for in ("cutile", "triton"):
        with pytest.raises(BackendUnavailableError, match="not torch.float64"):
            torch.autograd.grad(y, x, dy)
    else:
        check(torch.autograd.grad(y, x, dy), [expected])


@pytest.mark.parametrize("options", [{}, {"create_graph": True}, {"is_grads_batched": True}])
def test_memory_freed_before_the_backward(asked_for, tensors, options):
    """Under create_graph, and for batches of gradients, the process ended."""
    x, weight, dy = tensors
    held = x * 1.0
    y = rms_norm(held, (N,), weight, 1e-6, backend=asked_for)
    held.untyped_storage().resize_(0)
    dy = torch.stack([dy, dy]) if "is_grads_batched" in options else dy
    with pytest.raises(ValueError, match="x: expected memory behind its elements"):
        torch.autograd.grad(y, weight, dy, **options)


def test_parameters_can_be_swapped_while_y_lives(asked_for, tensors):
    """torch.utils.swap_tensors refuses tensors that are weakly referenced."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    y.backward(dy)
    torch.utils.swap_tensors(weight, torch.zeros_like(weight))


@pytest.mark.parametrize("options", [{}, {"create_graph": True}])
@pytest.mark.parametrize("make", [freed, freed_view, freed_minus])
def test_a_gradient_whose_memory_was_freed(asked_for, tensors, make, options):
    """Under create_graph the process ended, and where a minus sign was pending."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    dy = make(dy)
    with pytest.raises(ValueError, match="dy: expected memory behind its elements"):
        torch.autograd.grad(y, (x, weight), dy, **options)


@pytest.mark.parametrize("options", [{}, {"create_graph": True}])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_for_a_bias_alone_whose_memory_was_freed(tensors, is_transposed, options):
    """Rows of a transposed gradient are a copy: the process ended."""
    x, _, dy = tensors
    x, dy = (each.detach().view(2, 3, N) for each in (x, dy))
    if is_transposed:
        dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    bias = torch.zeros(N, device=x.device, requires_grad=True)
    y = rms_norm(x, (N,), None, 1e-6, bias=bias, backend="torch")
    dy.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="dy: expected memory behind its elements"):
        torch.autograd.grad(y, bias, dy, **options)


def test_the_backward_of_a_wide_bias_stays_with_backends_that_take_one(monkeypatch):
    """A gradient that had to be made plain sent it to a kernel that "auto" had not taken for the forward."""
    by_address.use(monkeypatch)
    x, weight, dy = make_tensors(CPU)
    bias = torch.zeros(N, requires_grad=True, dtype=torch.float64)
    expected = gradients_of_theirs(x, weight, dy)
    for gradient in (dy, torch._neg_view(-dy)):
        y = rms_norm(x, (N,), weight, 1e-6, bias=bias, backend="auto")
        dx, dw, db = torch.autograd.grad(y, (x, weight, bias), gradient)
        check((dx, dw, db), (*expected, dy.sum(0, dtype=torch.float64)))
    assert not by_address.calls
