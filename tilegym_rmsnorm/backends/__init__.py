# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backends. Each module here says cheaply whether it can run; see `tilegym_rmsnorm.registry` for the contract."""
