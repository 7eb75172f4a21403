# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Folder of the user's tuned settings."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from tilegym_rmsnorm.settings import CACHE_VARIABLE, parse_switch


def user_folder() -> Path | None:
    """Return the user's folder: TILEGYM_RMSNORM_CACHE_DIR, or the platform's folder for caches; None if off.

    None too without platformdirs, which pip installs along with this package; and, with one warning, where no home
    folder is known: HOME is unset and the user's number has no name, as in many containers, or a "~name" is nobody's.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named is None:
        try:
            import platformdirs
        except ImportError:
            return None
        try:
            folder = platformdirs.user_cache_dir("tilegym_rmsnorm", appauthor=False)
        except (RuntimeError, KeyError, OSError) as error:  # by its release, and by the platform
            _warn_homeless(f"{type(error).__name__}: {error}")
            return None
        if not os.path.isabs(folder):  # of older releases: "~" itself, which would be a folder of that name
            _warn_homeless(f"expected an absolute folder for caches, got {folder!r}")
            return None
    elif (word := named.strip()).lower() in ("", "none") or parse_switch(word) is False:
        return None
    else:
        folder = os.path.expanduser(named)
        if folder.startswith("~"):
            _warn_homeless(f"{CACHE_VARIABLE}: expected a user that exists, got {named!r}")
            return None
    return Path(folder)


@functools.cache
def _warn_homeless(reason: str) -> None:
    warnings.warn(
        f"no home folder is known, so tuned settings of the user's are neither read nor kept: {reason}. "
        f'Set {CACHE_VARIABLE} to a folder, or to "off", which says nothing.',
        stacklevel=2,
    )
