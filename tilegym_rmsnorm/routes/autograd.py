# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Record calls for autograd, of every op alike: eager ones and those of library ops.

A `Recording` says how a call runs, what it saves, and how its gradients are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.registry import unseen
from tilegym_rmsnorm.call.tensors import has_own_operations
from tilegym_rmsnorm.call.watched import count_modes

Tensors = tuple[Any, ...]


@dataclass(slots=True)  # not frozen: an op makes one a call, and that would take a microsecond more
class Recording:
    """Part of a recorded call that is not its tensors. It holds none of them: a known call keeps it."""

    run: Callable[[Tensors], Tensors]
    saved: Callable[[Tensors, Tensors], Tensors]  # of inputs and outputs, those that the backward needs
    # From a function that returns what was saved, the gradients of the results (None for one that nobody used), and
    # which inputs need one: the gradients of all inputs. Gradients of a sum alone must not ask for what was saved:
    # autograd raises if that was changed in place or freed, and hooks load or compute it.
    gradients: Callable[[Callable[[], Tensors], Tensors, tuple[bool, ...]], Tensors]
    returned: Callable[[Tensors], Any] | None = None  # the results, of the outputs; None: all of them
    without_gradient: Callable[[Tensors, tuple[bool, ...]], Tensors] | None = None  # results, of the outputs
    # The backend's function, where the first saved tensor is a result too: autograd detaches it, and a dispatch mode
    # may replace that. So modes are hidden as from this function.
    backward: Callable[..., Any] | None = None


class RecordedFunction(torch.autograd.Function):
    """Run a `Recording`. All but the tensors come in one object: each argument of `apply` costs host time. Subclasses
    give nodes of autograd's graph their names."""

    @staticmethod
    def forward(ctx, recording, *tensors):
        outputs = recording.run(tensors)
        ctx.recording = recording
        ctx.save_for_backward(*recording.saved(tensors, outputs))
        # The gradient of an unused result is None, and so are those that it leads to. Zeros would be no DTensor.
        ctx.set_materialize_grads(False)
        if recording.without_gradient is not None:
            if fixed := recording.without_gradient(outputs, ctx.needs_input_grad[1:]):
                ctx.mark_non_differentiable(*fixed)
        return outputs if recording.returned is None else recording.returned(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        recording = ctx.recording

        def saved() -> Tensors:
            tensors = ctx.saved_tensors
            if recording.backward is not None and has_own_operations(tensors[0]) and count_modes():
                with unseen(recording.backward):
                    tensors = ctx.saved_tensors
            return tensors

        return None, *recording.gradients(saved, gradients, ctx.needs_input_grad[1:])


@functools.cache
def apply_of(function: type[RecordedFunction]) -> Callable[..., Any]:
    """Return `function.apply` in C++. The Python around it, which checks for functorch and unwraps, costs 2 us. Dynamo
    before torch 2.13 does not know this apply, and never traces it here. Let autograd call the backward too without the
    Python that looks for it, which costs 0.6 us."""
    if (node := getattr(function, "_backward_cls", None)) is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd would record PyTorch's operations on these tensors."""
    return (
        torch.is_grad_enabled()
        and any([t is not None and t.requires_grad for t in tensors])
        and not torch.is_inference_mode_enabled()  # in that mode enable_grad() records nothing
    )
