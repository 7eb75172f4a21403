# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The kernels: all code that runs on the GPU, and none that chooses. These modules import cuda.tile alone."""

# ruff: noqa: F401
import inspect

from .backward import backward_rows, backward_tiles
from .backward_team import backward_pipelined_team, backward_team
from .forward import forward_rows, forward_tiles
from .forward_team import forward_team
from .pipelined import backward_pipelined
from .reduce import sum_partials
from .reread import backward_reread, forward_reread
from .rope import backward_rope, forward_rope
from .split import backward_split, backward_split_reread
from .team import clear_board
from .two_pass import backward_means, backward_strips
from .unaligned import backward_unaligned, backward_unaligned_team, forward_unaligned, forward_unaligned_team

# Whatever is imported here, by the names that variants have (plans/variants.py).
KERNELS = {name: each for name, each in list(globals().items()) if inspect.isfunction(each)}
