# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the kernels where other code calls an RMSNorm. `import tilegym_rmsnorm` loads none of the modules here.

aten            override aten's fused ops, which F.rms_norm and nn.RMSNorm call
fx              replace the nodes of those ops in traced graphs
huggingface     patch the norms of a model, recognized by the arithmetic of their forward
megatron        build Megatron-Core's norms from its specs
registration    count who asked for a change to another library, and undo it after the last
torchtitan      override the norms or layers of its models; _converter and _graphs: of its older releases, of its graphs
all others      offer the names and signatures of the library that the module is named after
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilegym_rmsnorm.settings import BackendName

if TYPE_CHECKING:
    from tilegym_rmsnorm.integrations.aten import Override
    from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

__all__ = ["override_aten", "patch_model", "unpatch_model"]


def override_aten(device_type: str = "cuda") -> Override:
    """Run `F.rms_norm`, `nn.RMSNorm` and their gradients on these kernels, without changes to the model.

    It overrides `aten::_fused_rms_norm` and `aten::_fused_rms_norm_backward`. PyTorch calls these ops where x and
    weight are both float16, both bfloat16 or both float32. Calls that no kernel of backend "cutile" or "triton" can
    take run as before, and so do all calls while `use_backend` or `set_backend` names another backend. Autograd stays
    PyTorch's, so that gradients of gradients, forward mode, `torch.func` and DTensor work as before. Graphs that
    Inductor compiles have no call of these ops.

    The override holds for the whole process, from the call on: until `undo()` of the returned object, or the end of its
    `with` block. Overrides may be nested and end in any order: the first one overrides, the last one to end undoes it.

        with override_aten() as override:
            F.rms_norm(x, (4096,), weight).sum().backward()
        print(override.stats)

    Args:
        device_type: `"cuda"`. Or `"cpu"`, for tests without a GPU: it overrides the ops of CPU tensors, whose kernels
            run in an interpreter, while a backend is asked for by name and its interpreter is switched on.

    Returns:
        A context manager with `undo()` and `stats`: for each of the two ops the number of calls "taken", and the number
        declined for each reason.

    Raises:
        ValueError: device_type is neither name.
        RuntimeError: PyTorch was built without CUDA, or its release has other ops. Nothing is overridden.
    """
    from tilegym_rmsnorm.integrations.aten import override

    return override(device_type)


def patch_model(
    model: torch.nn.Module, *, patch_layers: bool = False, backend: BackendName | None = None
) -> PatchReport:
    """Run the RMSNorms of a model, such as one of Hugging Face's, on the kernels of this package, in place.

    A norm is recognized by the arithmetic of its `forward`, with each rounding, read from its source; class names do
    not count. A module that computes something else stays unchanged, and is listed with the reason. A patched module
    keeps its parameters, buffers, hooks, eps, device, dtype and training flag. Its class becomes a subclass of its old
    class, with the same name. So the state dict is the original's, and the model can be saved, loaded, copied and
    compiled as before. y has the dtype of the original's y: in Llama's norm float32 for bfloat16 x and float32 weight.

    The values of weights are not read: weights may be on the meta device. A model without norms, and a second call with
    the same backend, change nothing. Models that accelerate has dispatched keep its hooks.

    Args:
        model: Any module, built or loaded.
        patch_layers: Also rewrite the layers in which a norm follows a residual add, so that one call does both. The
            sum is rounded as before. A norm with hooks receives the sum in a call of its own. And rewrite the attention
            in which the norms of q and k precede a rotary embedding, so that one call does all: see `qk_norm_rope`.
            Attention whose norms have hooks is left as it is. The norms may be `RMSNorm` of this package. A call that
            cannot be fused runs the parts one by one, and says why in the log, once, at level INFO.
        backend: A name or `"auto"`, for these norms. None: the backend in effect when a norm is called.

    Returns:
        A report of the patched modules, of those that would not be fused if they were called now (`apart`), and of the
        declined ones with reasons: `print` it.

    Raises:
        TypeError: model is no `torch.nn.Module`.
        ValueError: There is no such backend. Nothing is changed.
    """
    from tilegym_rmsnorm.integrations.huggingface.patch import patch

    return patch(model, patch_layers, backend)


def unpatch_model(model: torch.nn.Module) -> PatchReport:
    """Undo `patch_model`: give the norms, layers and attention of a model their old classes back.

    Args:
        model: Any module, patched or not.

    Returns:
        A report of the restored modules, and of modules that cannot be restored, since they got another class after
        the patch. `print` of the report says so where nothing in the model is patched.

    Raises:
        TypeError: model is no `torch.nn.Module`.
    """
    from tilegym_rmsnorm.integrations.huggingface.patch import unpatch

    return unpatch(model)
