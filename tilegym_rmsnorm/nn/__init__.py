# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Offer RMSNorm as a module, `RMSNorm`, and the two functions by which pickles make its classes with other defaults."""

from tilegym_rmsnorm.nn.configured import configured_class, instance_of
from tilegym_rmsnorm.nn.module import RMSNorm

__all__ = ["RMSNorm", "configured_class", "instance_of"]

# Pickles of configured classes name these so, wherever their file stands.
configured_class.__module__ = instance_of.__module__ = __name__
