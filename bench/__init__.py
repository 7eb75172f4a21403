# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark of tilegym_rmsnorm; `bench/run.sh` runs it, bench/README.md says how it measures."""
