# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Measuring one shape after the other: shapes, inputs, the check, the timing, and what a result says of its origin."""
