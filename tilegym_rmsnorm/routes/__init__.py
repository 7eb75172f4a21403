# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run a checked call by the route that choose.py chooses: a backend's kernels, a library op or PyTorch's operations."""
