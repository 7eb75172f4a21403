# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Known calls of kernels: the bits of calls that passed all checks, for every form, with and without grad; no tensor is
kept, and threads share what is known."""

import contextlib
import gc
import itertools
import threading
import weakref

import pytest
import torch
from every_op import assert_same_bits, each_op, note_unknown, of_each_op, usual
from helpers import BF16, DEVICE
from known_calls import rows
from variants import Variant

from tilegym_rmsnorm import RMSNorm, override_aten, rms_norm, use_backend
from tilegym_rmsnorm.integrations import aten as overrides
from tilegym_rmsnorm.ops.norm import eager, passes
from tilegym_rmsnorm.routes import known_calls

pytestmark = pytest.mark.usefixtures("known_kernels")

N = 40
PLAIN = Variant(BF16, (6, N), weight_dtype=BF16)
MORE = {  # layouts of x, of all kinds of calls
    "rms_norm": {
        "one row": PLAIN._replace(size=(N,)),
        "strided rows": PLAIN._replace(layout="gaps"),
        "overlapping rows": PLAIN._replace(layout="all expanded"),
        "columns apart": PLAIN._replace(layout="columns"),
        "rows that begin between 16 bytes": PLAIN._replace(layout="offset"),
        "odd rows": PLAIN._replace(size=(5, 37)),
        "residual of other strides": PLAIN._replace(size=(3, 2, N), residual_dtype=BF16, layout="heads"),
        "wide residual": PLAIN._replace(size=(2, 16392), residual_dtype=BF16),
    }
}


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@of_each_op(lambda op: {**usual(op), **MORE.get(op.name, {})})
def test_the_bits_of_calls_that_passed_all_checks(op, kind, needs_grad, monkeypatch):
    call, other = op.make(kind), op.make(kind, seed=1)

    def run(call):
        return (
            call.both_passes(backend="cutile") if needs_grad else call.public(*call.tensors, backend="cutile")
        )

    run(other)
    with contextlib.nullcontext() if needs_grad else torch.no_grad():
        run(other)  # under another grad mode it was another call
        unknown = note_unknown(op, monkeypatch)
        known = run(call)
        results = call.public(*(call.recorded() if needs_grad else call.tensors), backend="cutile")
    assert not unknown
    assert all(each._base is None for each in results), "autograd refuses operations in place on such views"
    known_calls.forget()
    expected = run(call)
    assert unknown and [each.stride() for each in known] == [each.stride() for each in expected]
    assert_same_bits(known, expected)


@each_op
def test_a_tensor_that_is_another_kind_makes_another_call(op):
    """By its strides, or that it requires a gradient."""
    first = op.make(op.alike)
    changes = (lambda t: torch.stack([t, t.cos()], -1)[..., 0], lambda t: t.detach().clone().requires_grad_())
    for name in first.leaves:
        for change in changes:
            found, given = [], (first.leaves | first.fixed) | {name: change(first.leaves[name])}
            for before in (first.tensors, given.values()):
                known_calls.forget()
                first.public(*before, backend="cutile")
                found.append(first.public(*given.values(), backend="cutile"))
            assert [each.requires_grad for each in found[0]] == [each.requires_grad for each in found[1]]
            assert_same_bits(*found)


def test_several_dimensions_are_known(checks):
    given = {"normalized_shape": (5, 8), "eps": 1e-5, "backend": "cutile"}
    for _ in range(2):
        checks.clear()
        x, weight = rows(3, 5, 8), rows(5, 8)
        y = rms_norm(x, weight=weight, **given)
    assert not checks
    known_calls.forget()
    assert torch.equal(rms_norm(x, weight=weight, **given), y)


def test_one_gradient_for_both_results(checks, monkeypatch):
    """A sum of both hands each the same tensor."""
    x, r = rows(6, N).requires_grad_(), rows(6, N).requires_grad_()
    slow, gradients = [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))
    dy, found = rows(6, N), []
    for _ in range(3):
        results = rms_norm(x, (N,), None, 1e-5, residual=r, backend="cutile")
        found.append(torch.autograd.grad(results, (x, r), (dy, dy)))
    assert len(slow) == 1
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@each_op
def test_one_tensor_given_twice_is_known(op, needs_grad, monkeypatch):
    """Guards take no tensor twice. A call of two tensors of the same metadata is another call."""
    first = op.make(op.alike)
    every = list((first.leaves | first.fixed).items())
    pairs = [
        (one, other)
        for (one, x), (other, y) in itertools.combinations(every, 2)
        if x.shape == y.shape and x.dtype == y.dtype and (one in first.leaves) == (other in first.leaves)
    ]
    assert pairs

    def run(seed, pairs):
        call = op.make(op.alike, seed=seed)
        given = {name: each.detach().requires_grad_(needs_grad) for name, each in call.leaves.items()}
        given |= call.fixed
        for one, other in pairs:
            given[other] = given[one]
        results, found = call.public(*given.values(), backend="cutile"), []
        leaves = {id(each): each for each in given.values() if each.requires_grad}
        if needs_grad:
            found = torch.autograd.grad(results, list(leaves.values()), call.dys)
        wide = {
            id(each): each.detach().double().requires_grad_(each.requires_grad) for each in given.values()
        }
        exact = call.exact(*(wide[id(each)] for each in given.values()))
        expected = list(exact)
        if needs_grad:
            dys = [each.double() for each in call.dys]
            expected += torch.autograd.grad(exact, [wide[each] for each in leaves], dys)
        for one, other in zip([*results, *found], expected, strict=True):
            limit = 1e-5 * other.abs().max().item()
            torch.testing.assert_close(one.double(), other, rtol=0, atol=limit)

    for twice in (pairs[:1], [], *([each] for each in pairs[1:]), pairs):
        run(0, twice)
        with monkeypatch.context() as patch:
            unknown = note_unknown(op, patch)
            run(1, twice)
            assert not unknown


def test_the_grad_mode_counts(checks):
    x = rows(6, N).requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not rms_norm(x, (N,), None, 1e-5, backend="cutile").requires_grad
        assert rms_norm(x, (N,), None, 1e-5, backend="cutile").requires_grad


def test_the_override_of_aten(checks):
    x, w = rows(6, N).requires_grad_(), rows(N).requires_grad_()

    def step():
        y = torch.nn.functional.rms_norm(x, (N,), w, 1e-5)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    aten = torch.ops.aten
    with use_backend("cutile"), override_aten(DEVICE.type) as override:
        first, *others = step(), step(), step()
        assert overrides._FORWARDS._kinds and overrides._BACKWARDS._kinds
        assert all(all(map(torch.equal, first, each)) for each in others)
        assert override.stats["_fused_rms_norm"] == override.stats["_fused_rms_norm_backward"] == {"taken": 3}
        y, rstd = aten._fused_rms_norm(x.detach(), [N], w.detach(), 1e-5)
        for mask in ((True, True), (True, False), (False, True), (True, True)):
            for _ in range(2):
                dx, dw = aten._fused_rms_norm_backward(y, x.detach(), [N], rstd, w.detach(), mask)
                assert (dx is not None, dw is not None) == mask
    with use_backend("cutile"), override_aten(DEVICE.type):
        for _ in range(2):  # a view at an offset, without rows
            y, rstd = aten._fused_rms_norm(x.detach()[6:], [N], w.detach(), 1e-5)
            assert y.shape == (0, N) and rstd.shape == (0, 1)


@of_each_op()
def test_no_tensor_is_kept(op, kind, quick_gc):
    """Nothing bound to the backward of a known call keeps one, nor do known calls of ops."""
    for seed in range(3):
        call = op.make(kind, seed=seed)
        given = call.recorded()
        results = [*call.public(*given, *call.fixed.values(), backend="cutile")]
        results += torch.autograd.grad(results, given, call.dys)
        of_forward, of_backward = (
            call.of_forward(*given, backend="cutile"),
            call.of_backward(op.wanted(kind)[-1], "cutile"),
        )
        with torch.no_grad():
            results += [*op.forward(*of_forward), *op.backward(*of_backward)]
        tensors = (*results, *given, *call.tensors, *of_forward, *of_backward)
        references = [weakref.ref(each) for each in tensors if isinstance(each, torch.Tensor)]
        del call, given, results, of_forward, of_backward, tensors
        gc.collect()
        assert not [each for each in references if each() is not None]
    assert sum(bool(each._kinds) for each in known_calls._SHARED) >= 3


def test_no_more_calls_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_KEYS", 5)
    module = RMSNorm(N, device=DEVICE, dtype=BF16, backend="cutile")
    for m in range(1, 12):
        module(rows(m, N))
    assert len(passes.KNOWN._kinds) <= 5
    for stride in range(N, N + 40, 4):  # the same key
        module(rows(4, stride)[:, :N])
    assert all(len(kinds) <= known_calls.MOST_KINDS for kinds in passes.KNOWN._kinds.values())


def test_threads():
    """Each with its own rows, which are known or not."""
    module, errors = RMSNorm(N, device=DEVICE, dtype=BF16, backend="cutile"), []
    inputs = [rows(m, N) for m in range(1, 9)]
    expected = [module(x).detach().clone() for x in inputs]
    known_calls.forget()

    def work(first):
        try:
            for i in range(24):
                at = (first + i) % len(inputs)
                x = inputs[at].clone().requires_grad_(i % 2 == 0)
                assert torch.equal(module(x), expected[at])
                if i % 7 == 0:
                    known_calls.forget()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
