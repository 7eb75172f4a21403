# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Modules: `RMSNorm`, and classes of it with other defaults, which pickles make by the two functions here."""

from tilegym_rmsnorm.nn.configured import configured_class, instance_of
from tilegym_rmsnorm.nn.module import RMSNorm

__all__ = ["RMSNorm", "configured_class", "instance_of"]

# Pickles of configured classes name these so, wherever their file stands.
configured_class.__module__ = instance_of.__module__ = __name__
