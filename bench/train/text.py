# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Read the text that models are trained on."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_EVERY = 20  # of the files, the first of each 20 is kept from training
THIRD_PARTY = {"site-packages", "dist-packages"}


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the training and the validation text, uint8: the Python standard library's own sources as bytes, which
    every machine has, in the order of their paths, the same on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not THIRD_PARTY & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    validation = b"".join(texts[::VALIDATION_EVERY])
    training = b"".join(text for i, text in enumerate(texts) if i % VALIDATION_EVERY)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, validation))


def batches(text: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield (batch, length + 1) int64 pieces of the text from random places, on the text's device, without end."""
    generator = torch.Generator(text.device).manual_seed(seed)
    window = torch.arange(length + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator, device=text.device)
        yield text[starts + window].long()
