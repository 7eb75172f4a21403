# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

import itertools
import pkgutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilegym_rmsnorm.integrations.huggingface import norms
from tilegym_rmsnorm.ops.norm.passes import NUMBERS


def recorded(monkeypatch: pytest.MonkeyPatch, module: str, name: str, noted: Callable[..., Any]) -> list[Any]:
    """Note each call of a function that a module of `integrations.huggingface` imported: what `noted` returns of it."""
    made: list[Any] = []

    def call(*arguments: Any, **options: Any) -> Any:
        made.append(noted(*arguments, **options))
        return original(*arguments, **options)

    path = f"tilegym_rmsnorm.integrations.huggingface.{module}.{name}"
    original = pkgutil.resolve_name(path)
    monkeypatch.setattr(path, call)
    return made


def recorded_norms(monkeypatch: pytest.MonkeyPatch, noted: Callable[..., Any]) -> list[Any]:
    """Note each call of `norm_of` by a norm, known ones too."""
    monkeypatch.setattr(norms._KNOWN, "find", lambda described: None)
    return recorded(monkeypatch, "norms", "norm_of", noted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of rms_norm by patched norms: their options, and x."""

    def noted(tensors: Any, numbers: Any, backend: Any) -> dict[str, Any]:
        x, _, _, residual = tensors
        return {"x": x, "residual": residual, "backend": backend, **dict(zip(NUMBERS, numbers, strict=True))}

    return recorded_norms(monkeypatch, noted)


@pytest.fixture
def residuals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether each rms_norm of a patched norm or a rewritten layer adds a residual."""
    return recorded_norms(monkeypatch, lambda tensors, *_: tensors[3] is not None)


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of qk_norm_rope by folded attention: their options, and the shape of q."""
    return recorded(
        monkeypatch, "folding", "qk_norm_rope", lambda q, *_, **options: {"shape": q.shape, **options}
    )


@pytest.fixture
def class_from(tmp_path: Path) -> Callable[..., type]:
    """Make a class from the source of its body, in a module of its own. scope: globals of that module."""
    numbers = itertools.count()

    def make(body: str, base: type = nn.Module, **scope: Any) -> type:
        path = tmp_path / f"made_{next(numbers)}.py"
        path.write_text("class Made(Base):\n" + textwrap.indent(body, "    "))
        scope = {"torch": torch, **scope, "__name__": path.stem, "Base": base}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        return scope["Made"]

    return make


@pytest.fixture
def class_of(class_from: Callable[..., type]) -> Callable[..., type]:
    """Make a class of attention from the source of its forward."""

    def make(source: str, rotary: Any = None, base: type | None = None, **scope: Any) -> type:
        from attention_classes import Attention
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return class_from(source, base or Attention, rotary=rotary or apply_rotary_pos_emb, **scope)

    return make
