# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""cuda-tile's cache of compiled kernels on disk, where its folder cannot be made.

cuda-tile 1.7.0 finds and stores nothing there, without a word; but when it then looks for what to evict (`evict_lru` of
cutile_cache/_cache.py) the same OSError ends the call. So every call compiles its kernel, and then fails. Where HOME is
unset and the user's number has no name the folder is one called "~" in the working directory.
"""

from __future__ import annotations

import os
import warnings

VARIABLE = "CUDA_TILE_CACHE_DIR"


def turn_off_where_it_fails() -> None:
    """Turn cuda-tile's disk cache off in this process if its folder cannot be made, with a warning."""
    try:
        from cuda.tile._cext import default_tile_context  # of which ct.compiler_timeout sets a field too

        folder = default_tile_context.config.cache_dir
    except (ImportError, AttributeError):  # another release, which may keep it elsewhere
        return
    if folder is None or (problem := _problem(folder)) is None:
        return
    default_tile_context.config.cache_dir = None
    warnings.warn(
        f"compiled kernels are not kept on disk, every process compiles its own: {problem}. "
        f'Set {VARIABLE} to a folder, or to "off", which says nothing.',
        stacklevel=2,
    )


def _problem(folder: str) -> str | None:
    if folder.startswith("~"):
        return "no home folder is known"
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return str(error)
    return None
