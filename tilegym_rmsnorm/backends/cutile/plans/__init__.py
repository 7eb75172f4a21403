# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Choice of kernels and settings for a problem: pure functions of numbers, without torch and cuda.tile."""
