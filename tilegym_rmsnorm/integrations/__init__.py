# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the kernels where other code calls an RMSNorm. `import tilegym_rmsnorm` loads none of the modules here.

aten            aten's fused ops, which F.rms_norm and nn.RMSNorm call
fx              the nodes of those ops in traced graphs
huggingface     the norms of a model, known by the arithmetic of their forward
all others      the names and signatures of the library that the module is named after
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tilegym_rmsnorm.integrations.aten import Override
    from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

__all__ = ["override_aten", "patch_model", "unpatch_model"]


def override_aten(device_type: str = "cuda") -> Override:
    """Run `F.rms_norm`, `nn.RMSNorm` and their gradients on these kernels, in models that are left as they are.

    It overrides `aten::_fused_rms_norm` and `aten::_fused_rms_norm_backward`. PyTorch calls them where x and weight are
    both float16, both bfloat16 or both float32. Calls that no kernel of backend "cutile" or "triton" can take run as
    before, and so do all where `use_backend` or `set_backend` names another backend. Autograd stays PyTorch's, so that
    gradients of gradients, forward mode, `torch.func` and DTensor work as before. Graphs that Inductor compiles have no
    call of these ops.

    It holds for the whole process, from the call on: until `undo()` of what is returned, or to the end of its `with`
    block. Overrides may lie in each other, and end in any order: the first one does the work, the last one undoes it.

        with override_aten() as override:
            F.rms_norm(x, (4096,), weight).sum().backward()
        print(override.stats)

    Args:
        device_type: `"cuda"`. Or `"cpu"`, for tests where there is no GPU: it overrides CPU tensors, whose kernels run
            in an interpreter, and only while their backend is asked for by name and its interpreter is switched on.

    Returns:
        A context manager with `undo()`, and `stats`: for each of the two ops how many calls were "taken", and how many
        declined for which reason.

    Raises:
        ValueError: device_type is no such name.
        RuntimeError: PyTorch was built without CUDA, or is a release whose ops are others. Nothing is overridden.
    """
    from tilegym_rmsnorm.integrations.aten import override

    return override(device_type)


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
