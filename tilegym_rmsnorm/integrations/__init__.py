# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What puts the kernels where others call an RMSNorm: each module is imported by the function that needs it."""
