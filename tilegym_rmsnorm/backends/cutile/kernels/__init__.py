# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The mathematics, as tile code: what runs on the GPU, and nothing that chooses. It imports cuda.tile alone."""

from .backward import backward_rows, backward_tiles
from .backward_team import backward_pipelined_team, backward_team
from .forward import forward_rows, forward_tiles
from .forward_team import forward_team
from .pipelined import backward_pipelined
from .reduce import sum_partials
from .reread import backward_reread, forward_reread
from .split import backward_split, backward_split_reread
from .team import clear_board
from .two_pass import backward_means, backward_strips

# By the names that variants have (plans/variants.py).
KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        *(forward_rows, forward_tiles, forward_team, forward_reread),
        *(backward_rows, backward_tiles, backward_pipelined, backward_team, backward_pipelined_team),
        *(backward_split, backward_split_reread, backward_reread, backward_means, backward_strips),
        *(sum_partials, clear_board),
    )
}
