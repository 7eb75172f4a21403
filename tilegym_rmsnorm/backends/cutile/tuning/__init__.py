# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The search for settings that are faster than those that ship: `python -m tilegym_rmsnorm tune`."""
