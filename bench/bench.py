# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What `python bench/train.py` finds by the name of this package, since Python looks beside the script first.

It stands for the package, and lets the checkout's own tilegym_rmsnorm be found; `python -m bench.train` never reads it.
"""

import sys
from pathlib import Path

__path__ = [str(Path(__file__).parent)]
sys.path[0] = str(Path(__file__).parents[1])
