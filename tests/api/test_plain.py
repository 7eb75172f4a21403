# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Plain tensors: the three places that ask for them without the longer checks must give one answer."""

import by_address
import pytest
import torch
from gate_cases import Named, freed, freed_view
from helpers import HAS_GPU

from tilegym_rmsnorm import BackendUnavailableError, override_aten, use_backend
from tilegym_rmsnorm.call import tensors as call_tensors
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.ops.norm import checks, passes
from tilegym_rmsnorm.ops.norm.eager import _are_as_saved
from tilegym_rmsnorm.ops.norm.spec import Spec
from tilegym_rmsnorm.routes import choose, known_calls

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
    numbers = 1e-6, (0.0, 1.0, None, None, "once"), "torch"
    given = {"x": X, "dy": R, "weight": W, "rstd": torch.ones(M), "d_residual_out": X + R}
    call = Call(Spec(N, 1e-6, 0.0, "once"), "torch", dtype=X.dtype)
    fit = [_are_as_saved(tuple({**given, name: make(each)}.values()), call) for name, each in given.items()]
    known = [
        is_known(lambda x, w, r: passes.norm_call((x, w, None, r), (N,), *numbers), (X, W, R), i, make)
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
    options = {"eps": 1e-6, "offset": 0.0, "casting": "once", "residual_alpha": 1.0}
    options |= {"residual_dtype": None, "out_dtype": None, "is_public": True}
    try:
        checked = checks.checked_forward(x, (N,), weight, None, None, **options)
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
