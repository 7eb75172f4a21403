# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Patch the RMSNorms of Hugging Face's models, and of similar code. A norm is known by the arithmetic of its forward.

    source, expressions, arithmetic, rotary     read what a function computes
    classes, norms, strides, rewriting          make classes of norms that call a kernel
    layers, attention, folding                  make classes of layers and attention, whose norms do more in one call
    unchanging, harmless, receivers, inplace    find code and modules beside a norm that forbid it
    patch, report, mapping                      give these classes to modules, here or for the library `kernels`

None of these modules imports transformers.
"""

from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match
from tilegym_rmsnorm.integrations.huggingface.attention import AttentionPatch
from tilegym_rmsnorm.integrations.huggingface.classes import loaded_class
from tilegym_rmsnorm.integrations.huggingface.layers import LayerPatch
from tilegym_rmsnorm.integrations.huggingface.mapping import kernel_mapping
from tilegym_rmsnorm.integrations.huggingface.norms import NormPatch
from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

__all__ = [
    "AttentionPatch",
    "LayerPatch",
    "Match",
    "NormPatch",
    "PatchReport",
    "kernel_mapping",
    "loaded_class",
]

# Pickles of patched modules name these so, wherever their files stand.
for each in (AttentionPatch, LayerPatch, Match, NormPatch, loaded_class):
    each.__module__ = __name__
