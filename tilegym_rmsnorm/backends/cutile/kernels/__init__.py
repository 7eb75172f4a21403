# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The mathematics, as tile code: what runs on the GPU, and nothing that chooses. It imports cuda.tile."""
