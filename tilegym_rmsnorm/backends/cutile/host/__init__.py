# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The host's part of a call: launcher.py and warm.py, which know no op, and a description of each op's kernels."""
