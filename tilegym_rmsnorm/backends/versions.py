# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Installed packages and their versions. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

Version = tuple[int, ...]


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> Version:
    """The numbers that a version starts with: (13, 4, 92)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise ValueError(f"version: expected MAJOR.MINOR..., got {text!r}")
    return tuple(map(int, match[0].split(".")))


def is_installed(package: str) -> bool:
    """Whether `package` can be imported; a folder of that name in the working directory is not it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
