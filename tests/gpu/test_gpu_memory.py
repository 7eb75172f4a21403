# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The most bytes that PyTorch's allocator gave out at once in a forward and in a backward, by what they return."""

import gc
import math

import pytest
import torch
from helpers import DEVICE
from living import size_of
from memory_cases import ADDED, KINDS, gradients_of, leaves_of, norm
from torch.utils.checkpoint import checkpoint
from variants import make

pytestmark = pytest.mark.parametrize("backend", ["cutile", "triton"], indirect=True)


def slack(variant) -> int:
    """Return the allocator's rounding, rstd, and another number a row."""
    return 2**18 + 2 * 4 * math.prod(variant.size[:-1])


def peak_of(call) -> int:
    # Autograd's thread may hold tensors of its last backward until the next one.
    torch.ones((), device=DEVICE, requires_grad=True).backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def of_partial_rows(variant) -> int:
    """dw_partial, and db_partial: a few float32 rows per multiprocessor, of heads a row of each."""
    width = variant.vector_shape[-1] * (variant.size[-2] if variant.weight == "heads" else 1)
    sums = 1 + (variant.bias_dtype is not None)
    rows = 8 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return sums * 4 * width * rows


@pytest.mark.parametrize("kind", KINDS)
def test_peak_of_a_forward(kind, backend):
    """The results alone: neither a copy of a slice, nor a sum that is written and read again."""
    variant = KINDS[kind]
    leaves = leaves_of(inputs := make(variant))
    least = size_of(*norm(variant, inputs, leaves, backend))  # compiles
    peak = peak_of(lambda: norm(variant, inputs, leaves, backend))
    assert least <= peak <= least + slack(variant)


@pytest.mark.parametrize("used", ["both", "y"])
@pytest.mark.parametrize("kind", KINDS)
def test_peak_of_a_backward(kind, used, backend):
    """The gradients, one for x and residual where one serves both, partial rows, and no zeros for an unused result."""
    variant = KINDS[kind]
    if used == "y" and not variant.has_residual:
        pytest.skip("there is no other")
    leaves = leaves_of(inputs := make(variant))

    def results():
        found = norm(variant, inputs, leaves, backend)
        return found[:1] if used == "y" else found

    gradients = {t.data_ptr(): t for t in gradients_of(results(), leaves, inputs)}  # compiles
    least = size_of(*gradients.values())
    del gradients
    made = results()
    peak = peak_of(lambda: gradients_of(made, leaves, inputs))
    partial = of_partial_rows(variant)
    assert partial < size_of(inputs.x) // 2, "of this bound a whole tensor would not show"
    assert least <= peak <= least + partial + slack(variant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_nothing(use_reentrant, backend):
    """Between forward and backward only the inputs and the results live."""
    leaves = leaves_of(inputs := make(ADDED))
    norm(ADDED, inputs, leaves, backend)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = checkpoint(
        lambda x, residual: norm(ADDED, inputs, {**leaves, "x": x, "residual": residual}, backend),
        leaves["x"],
        leaves["residual"],
        use_reentrant=use_reentrant,
    )
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= size_of(*results) + slack(ADDED)
    torch.autograd.backward(results, (inputs.dy, inputs.d_residual_out))


def test_offloading_keeps_nothing(backend):
    """residual_out is a result, and stays; of it nothing else is on the GPU when y and it are gone."""
    leaves = leaves_of(inputs := make(ADDED))
    norm(ADDED, inputs, leaves, backend)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.save_on_cpu():
        y = norm(ADDED, inputs, leaves, backend)[0]
    loss = y.float().sum()
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= slack(ADDED)
    loss.backward()
    assert leaves["x"].grad is not None
