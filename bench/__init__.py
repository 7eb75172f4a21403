# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark of tilegym_rmsnorm; `bench/run.sh` runs it, bench/README.md says how it measures.

The commands import other libraries. They ask for them first, so that one line names all that is missing and the command
that installs it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LIBRARIES = ("torch", "matplotlib", "tabulate", "tqdm")


def require(*modules: str) -> None:
    """Ends the process with one line if this interpreter lacks any of the modules, by default LIBRARIES."""
    missing = [name for name in modules or LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the benchmark needs {' '.join(missing)}. To install what it needs: {remedy()}")


def remedy() -> str:
    """The command that installs all of it into this interpreter."""
    return f"{sys.executable} -m pip install '{Path(__file__).resolve().parents[1]}[bench]'"
