# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Prepare a call before its route is chosen: check its arguments once, classify its tensors, ask what records it."""
