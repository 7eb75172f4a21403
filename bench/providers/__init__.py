# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Who is measured: this package's backends, PyTorch's own kernels, and other libraries."""
