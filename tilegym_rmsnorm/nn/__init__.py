# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Offer RMSNorm as a module, `RMSNorm`, and the functions that pickles name: of its classes with other defaults, and of
encoder layers that hold it."""

from tilegym_rmsnorm.nn.configured import configured_class, instance_of
from tilegym_rmsnorm.nn.fast_path import call_the_norms
from tilegym_rmsnorm.nn.module import RMSNorm

__all__ = ["RMSNorm", "call_the_norms", "configured_class", "instance_of"]

# Pickles name these so, wherever their file stands.
configured_class.__module__ = instance_of.__module__ = call_the_norms.__module__ = __name__
