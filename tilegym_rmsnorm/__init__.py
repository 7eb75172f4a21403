# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm for training and inference on NVIDIA GPUs, with several backends behind one set of functions.

Importing this package imports torch and nothing else. The libraries of a backend are imported when it first runs.
"""

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

# `python -m tilegym_rmsnorm doctor` imports this file before __main__ runs. Without this, a warning that torch gives on
# import would stand above the report. The filters of the process stay unchanged.
if getattr(sys, "argv", [])[:1] == ["-m"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        import torch  # noqa: F401

from tilegym_rmsnorm.backends.registry import (
    BackendUnavailableError,
    get_available_backends,
    get_available_backends_for_op,
    get_registry_info,
    is_backend_available,
)
from tilegym_rmsnorm.backends.warmup import warmup, warmup_rope
from tilegym_rmsnorm.functional import (
    compute_rms_norm_rstd_torch,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_torch,
    rms_norm_forward,
)
from tilegym_rmsnorm.integrations import override_aten, patch_model, unpatch_model
from tilegym_rmsnorm.main_grad import accumulate_main_grad
from tilegym_rmsnorm.nn.module import RMSNorm
from tilegym_rmsnorm.reproducibility import get_reproducible, reproducible, set_reproducible
from tilegym_rmsnorm.rope import qk_norm_rope, rms_norm_rope
from tilegym_rmsnorm.settings import (
    get_current_backend,
    get_sm_margin,
    set_backend,
    set_sm_margin,
    set_teams,
    use_backend,
    use_sm_margin,
)

if TYPE_CHECKING:
    from tilegym_rmsnorm.integrations.aten import Override
    from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

NOT_INSTALLED = "0+unknown"

try:
    __version__ = version("tilegym_rmsnorm")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = NOT_INSTALLED

__all__ = [
    "BackendUnavailableError",
    "Override",
    "PatchReport",
    "RMSNorm",
    "accumulate_main_grad",
    "compute_rms_norm_rstd_torch",
    "get_available_backends",
    "get_available_backends_for_op",
    "get_current_backend",
    "get_registry_info",
    "get_reproducible",
    "get_sm_margin",
    "is_backend_available",
    "override_aten",
    "patch_model",
    "qk_norm_rope",
    "reproducible",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_torch",
    "rms_norm_forward",
    "rms_norm_rope",
    "set_backend",
    "set_reproducible",
    "set_sm_margin",
    "set_teams",
    "unpatch_model",
    "use_backend",
    "use_sm_margin",
    "warmup",
    "warmup_rope",
]


def __getattr__(name: str) -> Any:
    """Import a class at its first use, where only annotations and isinstance need it."""
    if name == "Override":
        from tilegym_rmsnorm.integrations.aten import Override

        return Override
    if name == "PatchReport":
        from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

        return PatchReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
