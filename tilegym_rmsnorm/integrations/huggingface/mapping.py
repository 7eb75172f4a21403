# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Map layer names to these kernels, for `kernelize` of the library `kernels`, which binds a new forward to a module.

transformers names its norms by layer names: "RMSNorm" for the arithmetics of Llama, OLMo2 and Helium alike. So the
forward here looks at the class of the module that it is bound to, as `patch_model` does, and runs the class's own
forward where the arithmetic is not known.

For `kernels` 0.17 (`kernels/layer/layer.py`) a layer must be a subclass of nn.Module without a constructor and without
members but `forward`, `can_torch_compile` and `has_backward`, whose forward takes as many arguments as the one it
replaces. A repository must have `load()`, equality and a hash.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match, match_of
from tilegym_rmsnorm.integrations.huggingface.norms import computes_as_tensor, run
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

LAYER_NAMES = ("RMSNorm", "RMSNormZeroCentered")
MIN_VERSION = (0, 17)


class TileGymRMSNorm(nn.Module):
    """Layer whose forward `kernelize` binds to a model's norm. The forward reads that norm's weight and eps."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> Any:
        match = _matches.get(_name_of_match(type(self)))
        if match is not None and computes_as_tensor(hidden_states):
            call = match.call(self, hidden_states.shape, hidden_states.dtype)
            if call is not None:
                return run(hidden_states, match, call, None)
        return type(self).forward(self, hidden_states)


_matches: dict[str, Match] = {}


# A class keeps its forward while a model is compiled. A name is returned: Dynamo takes numbers and texts alone.
@torch.compiler.assume_constant_result
def _name_of_match(cls: type) -> str:
    """Return the key in `_matches` for the arithmetic of a class; "" without one."""
    try:
        match = match_of(cls)
    except Unclear:
        return ""
    name = repr(match)
    _matches[name] = match
    return name


class Repository:
    """Value of the mapping for a layer name. All repositories load the same layer, and are equal."""

    layer_name = TileGymRMSNorm.__name__

    def load(self) -> type[nn.Module]:
        return TileGymRMSNorm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repository)

    def __hash__(self) -> int:
        return hash(Repository)

    def __str__(self) -> str:
        return f"tilegym_rmsnorm, layer {self.layer_name}"


def kernel_mapping(device_type: str = "cuda") -> dict[str, Any]:
    """Return a mapping for `use_kernel_mapping` or `register_kernel_mapping` of the library `kernels`.

        from kernels import Mode, kernelize, use_kernel_mapping
        with use_kernel_mapping(kernel_mapping()):
            kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

    For `use_kernels=True` of transformers, which registers a mapping of its own, put this one into that:
    `get_kernel_mapping_transformers().update(kernel_mapping())`.

    The mapping serves every mode, training and torch.compile included, and the layer names `"RMSNorm"` and
    `"RMSNormZeroCentered"`. Norms with another layer name or none, such as Gemma's, are for `patch_model`, which needs
    no `kernels`.

    Args:
        device_type: The device type that `kernelize` finds on the model.

    Returns:
        A dict with a repository for each layer name and the device type.

    Raises:
        ImportError: `kernels` is not installed, or older than 0.17.
    """
    try:
        found = version("kernels")
    except PackageNotFoundError:
        raise ImportError(
            'kernel_mapping needs the library kernels, 0.17 or later: pip install "kernels>=0.17". '
            "patch_model(model) does the same without it"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        raise ImportError(f"kernel_mapping needs kernels 0.17 or later, not {found}")
    return {name: {device_type: Repository()} for name in LAYER_NAMES}
