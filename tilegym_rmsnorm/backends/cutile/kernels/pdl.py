# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Programmatic dependent launch: a kernel is launched while the one before still runs, and waits for it itself."""

import cuda.tile as ct

NO_BLOCK = 2**30  # more than any number that `wait_for_launch_before` is given


def wait_and_signal(DEPENDENT):
    """Wait for the launch before, and let the next kernel in: its blocks wait for this one's end."""
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()


def wait_for_launch_before(index):
    """Waits for the launch before, and has the compiler compute `index` first.

    index: made of the block's numbers, and below NO_BLOCK in every block of every grid (sizes.LARGEST_GRID
    and LARGEST_GRID_Y), so that every block waits. The compiler does not know that, and needs `index`
    to decide. Otherwise it puts all that follows from a block's number behind the wait, however early it is written:
    first a division, by the blocks of a cluster. H100, backward 16x4096: 2.33 -> 2.22 us.

    In `forward_rows` only with JOINT_WEIGHT, whose prototype had it: the others are up to 3 % slower by it (1024x4096).
    Not in the first kernels of the other backwards, which gained nothing (bench/NOTES.md).
    """
    if index < NO_BLOCK:
        ct.grid_dependency_control_wait()
