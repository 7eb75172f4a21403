# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Make a call plain: check its arguments once, and say which kinds of tensors it has and what surrounds it."""
