# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Keep `torch.nn.TransformerEncoderLayer` with an RMSNorm off its fast path.

On that path, in evaluation without grad, the layer does not call its norms. It reads their weight, bias and eps, and
computes LayerNorm, whatever the class of the norms: wrong values without an error. A norm cannot refuse it, since
nothing of the norm is called. So the layer is changed when it gets an RMSNorm, alone or inside a wrapper.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module, TransformerEncoderLayer
from torch.nn.modules.module import register_module_module_registration_hook

from tilegym_rmsnorm.nn.module import RMSNorm


def call_the_norms(layer: Module, inputs: tuple[Any, ...]) -> None:
    """Do nothing, as a pre-hook: a layer with a hook does not take its fast path."""


def keep_off_fast_path(module: Module, name: str, submodule: Module | None) -> None:
    """Keep an encoder layer that gets an RMSNorm off its fast path. PyTorch calls this for each registered module."""
    if not isinstance(module, TransformerEncoderLayer) or submodule is None:
        return
    if not any(isinstance(each, RMSNorm) for each in submodule.modules()):
        return
    # TransformerEncoder asks for this one too, before it makes nested tensors, which no norm but LayerNorm takes. It
    # is not enough: the constructor of the layer sets it after its norms, which may be RMSNorms by a replaced class.
    module.activation_relu_or_gelu = 0
    if call_the_norms not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(call_the_norms)


register_module_module_registration_hook(keep_off_fast_path)
