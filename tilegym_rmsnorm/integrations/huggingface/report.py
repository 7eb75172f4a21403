# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Report the modules that `patch_model` or `unpatch_model` changed, and those declined, each with its reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class PatchedNorm(NamedTuple):
    name: str  # the module's name in named_modules() of the model
    class_name: str
    arithmetic: str  # one of those that docs/huggingface.md lists


class PatchedLayer(NamedTuple):
    name: str
    class_name: str
    norms: tuple[str, ...]  # the children that add the residual too


class PatchedAttention(NamedTuple):
    name: str
    class_name: str
    norms: tuple[str, ...]  # of q and of k


class Declined(NamedTuple):
    name: str
    class_name: str
    reason: str


_LONGEST = 200  # characters of a reason


def elided(reason: str) -> str:
    """Shorten a reason. In place of what the innermost parentheses hold it says `...`, then of those around them."""
    depth = deepest = 0
    depths = []
    for character in reason:
        depth -= character in ")]}"
        depths.append(max(depth, 0))
        depth += character in "([{"
        deepest = max(deepest, depth)
    text = reason
    for most in range(deepest - 1, -1, -1):
        if len(text) <= _LONGEST:
            break
        parts = itertools.groupby(zip(reason, depths, strict=True), key=lambda each: each[1] > most)
        text = "".join("..." if is_deep else "".join(c for c, _ in part) for is_deep, part in parts)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST].rpartition(' ')[0]} ..."


class Restored(NamedTuple):
    name: str
    class_name: str


@dataclass(frozen=True)
class PatchReport:
    """Norms, layers and attention that `patch_model` or `unpatch_model` changed, and those left as they were. `str` of
    a report is a table for people.

    Args:
        patched: The norms that this call patched: name, class_name and arithmetic of each.
        layers: The layers that this call rewrote: name, class_name, and the norms that add the residual.
        attention: The attention that this call rewrote: name, class_name, and the norms of q and k, which run in one
            call with the rotary embedding.
        declined: Modules that look like a norm, a layer or such attention and were left as they are: name, class_name
            and reason of each.
        restored: Modules to which `unpatch_model` gave their class back: name and class_name of each.
        already: The number of norms, layers and attention that had been patched before, and so were left as they are.
        apart: Layers and attention among those above with a norm that would run apart from the add or the rotary
            embedding if it were called now: name, class_name and reason of each, once for each such norm.
        if_nothing: The text of a report that lists nothing.
    """

    __module__ = "tilegym_rmsnorm"

    patched: tuple[PatchedNorm, ...] = ()
    layers: tuple[PatchedLayer, ...] = ()
    attention: tuple[PatchedAttention, ...] = ()
    declined: tuple[Declined, ...] = ()
    restored: tuple[Restored, ...] = ()
    already: int = 0
    apart: tuple[Declined, ...] = ()
    if_nothing: str = field(default="no norms", repr=False, compare=False)

    @property
    def counts(self) -> dict[str, int]:
        """Count the entries of each field, by its name."""
        names = "patched", "layers", "attention", "declined", "restored"
        counts = {name: len(getattr(self, name)) for name in names}
        return counts | {"already": self.already, "apart": len(self.apart)}

    def __str__(self) -> str:
        lines = [
            *_section("patched", [(n.class_name, n.arithmetic, n.name) for n in self.patched]),
            *_section("layers", [(n.class_name, ", ".join(n.norms), n.name) for n in self.layers]),
            *_section("attention", [(n.class_name, ", ".join(n.norms), n.name) for n in self.attention]),
            *_section("run apart", [(n.class_name, n.reason, n.name) for n in self.apart]),
            *_section("declined", [(n.class_name, n.reason, n.name) for n in self.declined]),
            *_section("restored", [(n.class_name, "", n.name) for n in self.restored]),
        ]
        if self.already:
            lines.append(f"patched before: {self.already}")
        return "\n".join(lines) or self.if_nothing


def _section(title: str, entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Write a line for each class and detail: how many there are, and the name of the first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for class_name, detail, name in entries:
        groups.setdefault((class_name, detail), []).append(name)
    lines = []
    for (class_name, detail), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        detail = f" ({detail})" if detail else ""
        lines.append(f"  {len(names):4} {class_name}{detail}: {names[0] or 'the model itself'}{more}")
    total = sum(map(len, groups.values()))
    return [f"{title}: {total}", *lines] if total else []
