# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The device: its facts, memory, compiler and tuned settings; how kernels are launched on it or interpreted."""
