# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute a call on rows: contract.py defines a backend, registry.py chooses one, a folder or file implements each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy compares each with the contract
    from tilegym_rmsnorm.backends import cutile, torch_reference, triton
    from tilegym_rmsnorm.backends.contract import BackendModule

    _module: BackendModule = cutile
    _module = triton
    _module = torch_reference
