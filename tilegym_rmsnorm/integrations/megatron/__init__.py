# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the RMSNorms of Megatron-Core's models on these kernels, by its specs. Importing this imports no Megatron.

Written against Megatron-Core 0.16.1. `returns_residual` is that of its repository at d98e8a6, not yet released.
"""

from tilegym_rmsnorm.integrations.megatron.norm import RMSNorm, RMSNormWithResidual
from tilegym_rmsnorm.integrations.megatron.spec import SpecProvider, with_rms_norm

__all__ = ["RMSNorm", "RMSNormWithResidual", "SpecProvider", "with_rms_norm"]
