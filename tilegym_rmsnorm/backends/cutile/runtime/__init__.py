# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The device: its facts, memory and compiler, and how a kernel is launched on it or interpreted."""
