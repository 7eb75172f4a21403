# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Name the models that are trained, with their sizes and the sizes of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """A decoder with grouped attention and a gated MLP, and `batch` sequences for each data-parallel rank."""

    layers: int
    width: int
    inner_width: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    batch: int
    length: int
    has_qk_norm: bool = False
    eps: float = 1e-5

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def norms(self) -> int:
        """Count norms of a forward."""
        return self.layers * (4 if self.has_qk_norm else 2) + 1

    @property
    def flops_per_token(self) -> int:
        """Count floating-point operations of a step for one token: those of matrices and of causal attention, where
        the backward takes twice as many as the forward."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        matrices = (
            self.layers * (attention + 3 * self.width * self.inner_width) + self.width * self.vocabulary
        )
        # A query meets half of all keys, once for the score and once for the value.
        scores = self.layers * self.heads * self.head * self.length
        return 6 * (matrices + scores)


BYTES = 256  # the vocabulary of decoders whose text is bytes
LARGE_VOCABULARY = 128256
MODELS = {
    # transformers' classes, by the sizes of the models that they are named for
    "llama-1b": Sizes(16, 2048, 8192, 32, 8, 64, LARGE_VOCABULARY, batch=4, length=2048),
    "qwen3-1.7b": Sizes(28, 2048, 6144, 16, 8, 128, 151936, batch=4, length=2048, has_qk_norm=True, eps=1e-6),
    # decoder.py's
    "decoder-4096": Sizes(6, 4096, 14336, 32, 8, 128, BYTES, batch=2, length=4096),
    "decoder-2048-qk": Sizes(10, 2048, 6144, 16, 8, 128, BYTES, batch=4, length=4096, has_qk_norm=True),
    "llama-8b": Sizes(32, 4096, 14336, 32, 8, 128, LARGE_VOCABULARY, batch=1, length=8192),
}
HUGGING_FACE = ("llama-1b", "qwen3-1.7b")
USUAL = tuple(name for name in MODELS if name != "llama-8b")  # one GPU has not the memory to train it


def tiny(sizes: Sizes) -> Sizes:
    """Shrink a model to what a CPU trains in seconds: eight heads of 8, so that eight processes have one each."""
    return replace(
        sizes,
        layers=2,
        width=64,
        inner_width=128,
        heads=8,
        kv_heads=8,
        head=8,
        vocabulary=BYTES,
        batch=2,
        length=32,
    )
