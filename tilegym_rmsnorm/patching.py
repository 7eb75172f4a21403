# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`patch_model` and `unpatch_model`, which import what they need when they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

__all__ = ["patch_model", "unpatch_model"]


def patch_model(
    model: torch.nn.Module, *, patch_layers: bool = False, backend: str | None = None
) -> PatchReport:
    """Run the RMSNorms of a model, such as one of Hugging Face's, on the kernels of this package, in place.

    A norm is known by what its `forward` computes, with each rounding, read from its source; the names of classes say
    nothing. What computes something else is left as it is, and listed with the reason. A patched module keeps its
    parameters, buffers, hooks, eps, device, dtype and training flag; its class becomes a subclass of the one it had,
    under the same name. So the state dict is the original's, and the model is saved, loaded, copied and compiled as
    before. y has the dtype that the original gives it: in Llama's norm float32 for bfloat16 x beside a float32 weight.

    Nothing is read from the weights, which may be on the meta device. A model without norms, and a second call with
    the same backend, change nothing. Models that accelerate has dispatched keep its hooks.

    Args:
        model: Built or loaded; any module.
        patch_layers: Also rewrite the layers in which a norm follows a residual add, so that one call does both. The
            sum is rounded as before. A norm with hooks gets the sum, in a call of its own.
        backend: A name or `"auto"`, for these norms. None: the one in effect when a norm is called.

    Returns:
        What was patched, and what was declined for which reason: `print` it.

    Raises:
        TypeError: model is no `torch.nn.Module`.
        ValueError: There is no such backend. Nothing is changed.
    """
    from tilegym_rmsnorm.integrations.huggingface.patch import patch

    return patch(model, patch_layers, backend)


def unpatch_model(model: torch.nn.Module) -> PatchReport:
    """Take back what `patch_model` did to a model: its norms and layers get the classes they had.

    Args:
        model: Patched or not; any module.

    Returns:
        What was restored, and what could not be: modules that were given another class after the patch. `print` of it
        says so where nothing in the model is patched.

    Raises:
        TypeError: model is no `torch.nn.Module`.
    """
    from tilegym_rmsnorm.integrations.huggingface.patch import unpatch

    return unpatch(model)
