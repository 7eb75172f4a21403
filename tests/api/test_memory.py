# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Memory: what is saved for the backward, and what lives at the peak of a forward and of a backward.

Peaks are those of backends with kernels of their own; the reference makes whole float32 tensors. On a GPU
tests/gpu/test_gpu_memory.py asks the allocator.
"""

import contextlib
import functools
import gc

import pytest
import torch
from every_op import assert_same_bits, every_kind, of_each_op
from helpers import BF16, FP32, HAS_GPU, why_skip
from living import Living, size_of
from memory_cases import ADDED, KINDS, OF_HEADS, gradients_of, leaves_of, norm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from variants import check, make


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved(kind, backend):
    """x, or residual_out in its place, the weight and rstd; a slice is not copied."""
    variant = KINDS[kind]
    leaves, saved = leaves_of(inputs := make(variant)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = norm(variant, inputs, leaves, backend)
    normalized, *rest = saved
    expected = results[1] if variant.has_residual else leaves["x"]
    assert normalized.data_ptr() == expected.data_ptr() and normalized.dtype == expected.dtype
    assert normalized.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    weight, rstd = rest
    assert weight.data_ptr() == leaves["weight"].data_ptr()
    m = inputs.x.numel() // variant.n
    assert (rstd.shape, rstd.dtype, rstd.untyped_storage().nbytes()) == ((m,), FP32, 4 * m)


def test_nothing_is_kept_beside_what_is_saved(backend, quick_gc):
    """Neither x nor residual lives on where only the results are held."""
    from torch.multiprocessing.reductions import StorageWeakRef

    inputs = make(ADDED)
    leaves = {
        name: None if t is None else t * 1 for name, t in leaves_of(inputs).items()
    }  # no leaves: may be freed
    results = norm(ADDED, inputs, leaves, backend)
    ends = [StorageWeakRef(leaves[name].untyped_storage()) for name in ("x", "residual")]
    del leaves
    gc.collect()  # interpreters hold what they were given in cycles
    assert all(end.expired() for end in ends)
    assert all(result.requires_grad for result in results)


@pytest.fixture(params=["cutile", "triton"])
def kernels(request, monkeypatch):
    """A backend with kernels, in its interpreter, whose own tensors no mode sees; few rows are many."""
    if HAS_GPU:
        pytest.skip("the allocator says it: tests/gpu/test_gpu_memory.py")
    if reason := why_skip(request.param):
        pytest.skip(reason)
    monkeypatch.setattr("tilegym_rmsnorm.backends.registry._disable_current_modes", contextlib.nullcontext)
    if request.param == "triton":
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", unseen(GridExecutor.__call__))
        return request.param
    request.getfixturevalue("fresh_plans")
    from tilegym_rmsnorm.backends.cutile.plans import sizes
    from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

    bind = InterpretedMachine.bind
    monkeypatch.setattr(InterpretedMachine, "bind", lambda *given: unseen(bind(*given)))
    # Not the interpreter's own, which notes beside each array what was written.
    monkeypatch.setattr(
        InterpretedMachine, "empty", lambda self, shape, dtype: torch.empty(shape, dtype=dtype)
    )
    monkeypatch.setattr(sizes, "FEW_ROWS", 8)
    return request.param


def unseen(launch):
    """Hide a launch from every mode."""

    def launched(*given, **options):
        with _disable_current_modes():
            return launch(*given, **options)

    return launched


def slack(inputs) -> int:
    """Allow partial rows, rstd and the like a quarter of a tensor of 16 bits."""
    return inputs.x.numel() * 2 // 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_peak_of_a_forward(kind, kernels):
    """The results alone: neither a copy of a slice, nor a sum that is written and read again."""
    variant = KINDS[kind]
    leaves = leaves_of(inputs := make(variant))
    with Living(*inputs) as living:
        results = norm(variant, inputs, leaves, kernels)
    least = size_of(*results)
    assert least <= living.peak <= least + slack(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("used", ["both", "y"])
@pytest.mark.parametrize("kind", KINDS)
def test_peak_of_a_backward(kind, used, kernels):
    """The gradients, one for x and residual where one serves both; and no zeros for a result that nobody used."""
    variant = KINDS[kind]
    if used == "y" and not variant.has_residual:
        pytest.skip("there is no other")
    leaves = leaves_of(inputs := make(variant))
    results = norm(variant, inputs, leaves, kernels)
    with Living(*inputs, *results) as living:
        gradients = gradients_of(results[:1] if used == "y" else results, leaves, inputs)
    found = {t.data_ptr(): t for t in gradients}.values()
    serves_both = variant.has_residual and variant.alpha == 1 and variant.residual_dtype == variant.dtype
    assert len(found) == len(gradients) - serves_both
    least = size_of(*found)
    assert least <= living.peak <= least + slack(inputs)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("needing", ["x", "residual", "weight"])
def test_peak_of_a_backward_for_one(needing, alpha, kernels):
    """The gradient of the other is not made beside it; dw needs no dx, but the kernel that makes it writes one."""
    variant = ADDED._replace(alpha=alpha)
    leaves = leaves_of(inputs := make(variant), (needing,))
    results = norm(variant, inputs, leaves, kernels)
    with Living(*inputs, *results) as living:
        (gradient,) = gradients_of(results[:1] if needing == "weight" else results, leaves, inputs)
    most = size_of(inputs.x) + slack(inputs)
    assert living.peak <= most
    if needing == "weight":
        inputs = inputs._replace(d_residual_out=None)
    name = {"x": "dx", "residual": "d_residual", "weight": "dw"}[needing]
    check(variant, inputs, results[1].detach(), **{name: gradient})


@pytest.mark.parametrize("weight", ["none", "vector", "heads"])
@pytest.mark.parametrize("needing", [("bias",), ("x", "bias")])
def test_peak_of_db_without_dw(needing, weight, kernels):
    """A transposed dy is copied to be summed, but not beside dx; with a frozen weight and without one."""
    variant = OF_HEADS._replace(bias_dtype=BF16, weight=weight, layout="transposed")
    leaves = leaves_of(inputs := make(variant), needing)
    results = norm(variant, inputs, leaves, kernels)
    with Living(*inputs, *results) as living:
        gradients = gradients_of(results, leaves, inputs)
    assert living.peak <= size_of(inputs.x) + slack(inputs)  # of dx, or of the copy
    # those that need one, in the order of the leaves
    check(variant, inputs, **dict(zip(["dx", "db"][-len(needing) :], gradients, strict=True)))


def save_all(*_, **__):
    return CheckpointPolicy.MUST_SAVE


WRAPPED = {
    "reentrant": lambda call, *given: checkpoint(call, *given, use_reentrant=True),
    "not reentrant": lambda call, *given: checkpoint(call, *given, use_reentrant=False),
    "all results saved": lambda call, *given: checkpoint(
        call,
        *given,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, save_all),
    ),
    "offloaded": lambda call, *given: within(torch.autograd.graph.save_on_cpu(), call, *given),
    "packed": lambda call, *given: within(
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()),
        call,
        *given,
    ),
}


def within(block, call, *given):
    with block:
        return call(*given)


def passes(call, function):
    """Return results and gradients, by `backward`, as reentrant checkpoints need it."""
    leaves = call.recorded()
    results = function(*leaves, *call.fixed.values())
    torch.autograd.backward(results, call.dys)
    return [*results, *(leaf.grad for leaf in leaves)]


def check_wrapped(call, names, **options):
    function = functools.partial(call.public, **options)
    expected = passes(call, function)
    for name in names:
        assert_same_bits(passes(call, functools.partial(WRAPPED[name], function)), expected)


@pytest.mark.slow
@every_kind
def test_checkpointed_and_offloaded(op, kind, backend):
    """Results keep their bits."""
    check_wrapped(op.make(kind), WRAPPED, backend=backend)


@pytest.mark.parametrize("name", WRAPPED)
@of_each_op()
def test_checkpointed(op, kind, name):
    check_wrapped(op.make(kind), [name])
