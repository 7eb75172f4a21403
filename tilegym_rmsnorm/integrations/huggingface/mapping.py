# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A mapping for `kernelize` of the library `kernels`, which puts the forward of a layer from elsewhere onto a module.

transformers names its norms by layer names: "RMSNorm" for the arithmetics of Llama, OLMo2 and Helium alike. So the
forward here looks at the class of the module that it finds itself on, as `patch_model` does, and where that class has
no arithmetic that is known it runs the forward that was there.

What `kernels` asks of a layer, by its `kernels/layer/layer.py` of 0.17: a subclass of nn.Module without a constructor
and without members but `forward`, `can_torch_compile` and `has_backward`, whose forward takes as many arguments as the
one it replaces. What it asks of a repository: `load()`, equality and a hash.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match, match_of
from tilegym_rmsnorm.integrations.huggingface.norms import run
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

LAYER_NAMES = ("RMSNorm", "RMSNormZeroCentered")
MIN_VERSION = (0, 17)


class TileGymRMSNorm(nn.Module):
    """The layer: `kernelize` binds its forward to a model's norm, whose weight and eps it reads."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> Any:
        match = _matches.get(_name_of_match(type(self)))
        if match is not None:
            call = match.call(self, hidden_states.shape, hidden_states.dtype)
            if call is not None:
                return run(hidden_states, match, call, None)
        return type(self).forward(self, hidden_states)


_matches: dict[str, Match] = {}


# A class keeps its forward while a model is compiled. Of results Dynamo takes numbers and texts alone.
@torch.compiler.assume_constant_result
def _name_of_match(cls: type) -> str:
    """The key in `_matches` of the arithmetic of a class; "" without one."""
    try:
        match = match_of(cls)
    except Unclear:
        return ""
    name = repr(match)
    _matches[name] = match
    return name


class Repository:
    """What the mapping gives for a layer name. All of them load the same layer, and are equal."""

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
    """A mapping for `use_kernel_mapping` or `register_kernel_mapping` of the library `kernels`.

        from kernels import Mode, kernelize, use_kernel_mapping
        with use_kernel_mapping(kernel_mapping()):
            kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

    It serves every mode, training and torch.compile included, and the layer names `"RMSNorm"` and
    `"RMSNormZeroCentered"`. Norms that have neither, such as Gemma's, are for `patch_model`, which needs no `kernels`.

    Args:
        device_type: As `kernelize` finds it on the model.

    Returns:
        The layer names, with a repository for the device type.

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
