# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""How fast a call is, and how far from exact: what tuning, the doctor and the benchmark share."""
