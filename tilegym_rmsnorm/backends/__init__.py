# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backends: contract.py defines one, registry.py chooses one for a call."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy compares each with the contract
    from tilegym_rmsnorm.backends import cutile, torch_reference, triton
    from tilegym_rmsnorm.backends.contract import BackendModule

    _module: BackendModule = cutile
    _module = triton
    _module = torch_reference
