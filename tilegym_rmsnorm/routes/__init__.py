# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run a checked call by one of three routes, which choose.py chooses: kernels, a library op, PyTorch's operations."""
