# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Laws of every op: however its tensors lie in memory values are the same, and results are contiguous; autocast changes
what the documentation says; fake tensors have the metadata of real ones; calls without rows."""

import itertools

import pytest
import torch
from every_op import OPS, assert_same_bits, ends, few, fresh, of_each_op, present, usual, usual_kinds
from helpers import BACKENDS, BF16, DEVICE, FP16, HAS_GPU, in_turn, settle_interpreters
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import jvp, vmap
from torch.utils._pytree import tree_map_only
from variants import arranged

from tilegym_rmsnorm.settings import AUTO_ORDER

LAYOUTS = "gaps", "columns", "transposed", "expanded", "offset", "one number"


def few_and_alike(op):
    return {**few(op), "alike": op.alike}


def layouts_of(op):
    """Give each kind of calls one layout of all tensors, or of each tensor the next one: a sixth, and all as slow."""
    kinds, every = few_and_alike(op), ("contiguous", *LAYOUTS)
    layouts = [
        *((each,) for each in LAYOUTS),
        *(every[first:] + every[:first] for first in range(len(every))),
    ]
    quick = in_turn(kinds, layouts, of=6)
    for case in itertools.product(kinds, layouts):
        name, given = case
        marks = [] if case in quick else [pytest.mark.slow]
        yield pytest.param(op, kinds[name], given, id="-".join((op.name, name, *given[:2])), marks=marks)


def with_tensors(call, tensors):
    """Return the call with other leaves, fixed tensors and gradients of results."""
    tensors = iter(tensors)
    leaves, fixed = ({name: next(tensors) for name in each} for each in (call.leaves, call.fixed))
    return call._replace(leaves=leaves, fixed=fixed, dys=tuple(tensors))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("op", "kind", "layouts"), [case for op in OPS for case in layouts_of(op)])
def test_layouts(op, kind, layouts, backend):
    """Values are those of contiguous copies, results are contiguous, and the tensors stay as they were."""
    call = fresh(op, kind)
    every = (*call.tensors, *call.dys)
    given = [arranged(each, layout) for each, layout in zip(every, itertools.cycle(layouts), strict=False)]
    copies = [each.contiguous().clone() for each in given]
    found, expected = (with_tensors(call, each).both_passes(backend=backend) for each in (given, copies))
    assert_same_bits(given, copies)
    assert all(each.is_contiguous() for each in found)
    if backend == "cutile" or HAS_GPU:  # sums of other blocks
        for one, other in zip(found, expected, strict=True):
            limit = 8 * torch.finfo(one.dtype).eps * other.double().abs().amax()
            assert one.dtype is other.dtype and (one.double() - other).abs().amax() <= limit
    else:
        assert_same_bits(found, expected)


def metadata(results):
    return [(each.shape, each.dtype, each.stride(), each.device) for each in results]


def empty(op):
    """Kinds of calls without rows."""
    return {
        f"{name}, {number}": each
        for name, kind in few_and_alike(op).items()
        for number, each in enumerate(op.empty(kind))
    }


@of_each_op(lambda op: {**usual(op), **empty(op)})
def test_fake_results_of_library_ops(op, kind):
    call, mode = op.make(kind), FakeTensorMode()
    given = [(op.forward, call.of_forward(*call.leaves.values()))]
    given += [(op.backward, call.of_backward(wanted)) for wanted in op.wanted(kind)]
    for run, arguments in given:
        expected = present(run(*arguments))
        with mode:
            found = present(run(*tree_map_only(Tensor, mode.from_tensor, arguments)))
        assert all(type(each) is FakeTensor for each in found)
        assert metadata(found) == metadata(expected)


@pytest.mark.parametrize("name", [None, *AUTO_ORDER])
@usual_kinds
def test_fake_results_of_calls(op, kind, name):
    """Fakes have no memory: no kernel runs."""
    call = op.make(kind)
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(each) for each in (*call.tensors, *call.dys)]
        found = with_tensors(call, tensors).both_passes(backend=name)
    assert all(type(each) is FakeTensor for each in found)
    # PyTorch's operations give gradients strides of their own.
    count = len(call.dys) if name == "torch" else len(found)
    assert metadata(found[:count]) == metadata(call.both_passes(backend="torch")[:count])


@pytest.mark.parametrize(
    ("op", "kind", "backend"),
    [
        pytest.param(op, kind, backend, id=f"{op.name}, {name}, {backend}")
        for op in OPS
        for backend in BACKENDS
        for name, kind in (op.kinds if backend == "torch" else ends(op)).items()
    ],
    indirect=["backend"],
)
def test_autocast(op, kind, backend, monkeypatch):
    """Calls are cast as is documented; library ops are not."""
    settle_interpreters(monkeypatch)
    call = fresh(op, kind)
    options, dtype = op.autocast(kind)

    def cast(*given, **others):
        return call.public(*(each.to(dtype or each.dtype) for each in given), **options, **others)

    expected = call.both_passes(cast, backend=backend)
    by_op = call.by_op(*call.tensors, backend=backend)
    with torch.autocast(DEVICE.type, FP16 if kind.dtype is BF16 else BF16):
        for _ in range(2):  # the second call is known
            assert_same_bits(call.both_passes(backend=backend), expected)
        assert_same_bits(call.by_op(*call.tensors, backend=backend), by_op)


def in_a_graph(function, *given):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)(*given)


COMPOSED = {  # ways of a call to PyTorch's operations, of a function and its leaves
    "compiled": lambda f, *given: in_a_graph(f, *(each.detach() for each in given)),
    "compiled, differentiated": in_a_graph,
    "forward mode": lambda f, *given: jvp(f, given, given)[0],
    "mapped": lambda f, *given: [each[0] for each in vmap(f)(*(each[None] for each in given))],
}


@pytest.mark.parametrize(
    "way", [pytest.param(each, marks=[pytest.mark.slow] * ("compiled" in each)) for each in COMPOSED]
)
@of_each_op(few_and_alike)
def test_results_of_pytorch_s_operations(op, kind, way):
    """They are contiguous, in graphs too, where `view` failed: PyTorch's operations keep the order of strides. And they
    may be changed in place."""
    call = fresh(op, kind)
    leaves = [arranged(each, "transposed").requires_grad_() for each in call.leaves.values()]

    def function(*leaves):
        results = call.public(*leaves, *call.fixed.values(), backend="torch")
        return tuple(each.view(-1).view(each.shape) for each in results)

    results, expected = COMPOSED[way](function, *leaves), function(*leaves)
    assert all(each.is_contiguous() for each in results)
    torch.testing.assert_close(results, expected)
    for result, other in zip(results, expected, strict=True):
        result.mul_(2)
        torch.testing.assert_close(result, 2 * other)


@pytest.mark.parametrize("is_op", [False, True], ids=["function", "op"])
@of_each_op(empty)
def test_no_rows(op, kind, is_op, backend):
    call = op.make(kind)
    found = call.both_passes(call.by_op if is_op else call.public, backend=backend)
    results, gradients = found[: len(call.dys)], found[len(call.dys) :]
    assert [each.shape for each in results] == [each.shape for each in call.dys]
    for gradient, leaf in zip(gradients, call.leaves.values(), strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype) and not gradient.any()
    for result in call.public(*call.recorded(), *call.fixed.values(), backend=backend):
        result.mul_(2)
