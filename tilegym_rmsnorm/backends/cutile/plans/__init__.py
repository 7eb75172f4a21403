# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which kernels serve a problem, by which settings: pure functions of numbers, without torch and cuda.tile."""
