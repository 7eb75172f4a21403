# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

from __future__ import annotations

from typing import Any

import pytest

import tilegym_rmsnorm


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of rms_norm by patched norms: their options, and x."""
    from tilegym_rmsnorm.integrations.huggingface import norms

    made: list[dict[str, Any]] = []

    def rms_norm(x: Any, *arguments: Any, **options: Any) -> Any:
        made.append({"x": x, **options})
        return tilegym_rmsnorm.rms_norm(x, *arguments, **options)

    monkeypatch.setattr(norms, "rms_norm", rms_norm)
    return made
