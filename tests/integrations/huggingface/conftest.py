# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
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


@pytest.fixture
def class_of(tmp_path: Path) -> Callable[..., type]:
    """Make a class from the source of its forward. scope: globals of its module."""
    made: list[Path] = []

    def make(source: str, rotary: Any = None, base: type | None = None, **scope: Any) -> type:
        import torch
        from attention_classes import Attention
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        path = tmp_path / f"attention_{len(made)}.py"
        made.append(path)
        path.write_text("class Made(Base):\n" + textwrap.indent(source, "    "))
        namespace = {
            "__name__": path.stem,
            "Base": base or Attention,
            "torch": torch,
            "rotary": rotary or apply_rotary_pos_emb,
            **scope,
        }
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        return namespace["Made"]

    return make


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of qk_norm_rope by folded attention: their options."""
    from tilegym_rmsnorm.integrations.huggingface import folding

    made: list[dict[str, Any]] = []

    def qk_norm_rope(*arguments: Any, **options: Any) -> Any:
        made.append(options)
        return original(*arguments, **options)

    original = folding.qk_norm_rope
    monkeypatch.setattr(folding, "qk_norm_rope", qk_norm_rope)
    return made
