# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Measure how fast a call is, and how far from exact. Used by tuning, the doctor and the benchmark."""
