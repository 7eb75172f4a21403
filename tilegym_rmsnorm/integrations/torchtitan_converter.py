# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Convert the norms of models of torchtitan 0.2, which has no overrides, by its registry of model converters.

    --experimental.custom_import tilegym_rmsnorm.integrations.torchtitan_converter --model.converters tilegym_rmsnorm

Written against torchtitan 0.2.2, which imports this module; it registers the converter.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

try:
    from torchtitan.protocols.model_converter import register_model_converter
except ImportError as error:
    raise ImportError(
        "expected torchtitan 0.2, which has model converters; from 0.3 on give "
        "--override.imports tilegym_rmsnorm.integrations.torchtitan.rms_norm"
    ) from error

from tilegym_rmsnorm.integrations import patch_model

NAME = "tilegym_rmsnorm"  # behind --model.converters

_log = logging.getLogger("tilegym_rmsnorm")


class NormConverter:
    """Run `patch_model` on a model before torchtitan shards it. `unpatch_model` undoes it."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        pass

    def convert(self, model: nn.Module) -> None:
        """Patch the norms of model, in place, and log which."""
        _log.info("torchtitan: %s", patch_model(model))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: a norm has nothing to be computed behind a step."""


register_model_converter(NormConverter, NAME)
