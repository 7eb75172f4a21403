# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Where scripts/environment.sh installs torchtitan 0.2.2, beside the newer one, and what it lacks here."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix, "torchtitan-0.2.2")
MISSING = [name for name in ("tyro", "torchdata") if importlib.util.find_spec(name) is None]
if not FOLDER.is_dir():
    MISSING.append(f"torchtitan 0.2.2 in {FOLDER}")
