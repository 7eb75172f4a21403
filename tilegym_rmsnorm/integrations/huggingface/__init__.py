# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Patch the RMSNorms of Hugging Face's models, and of similar code. A norm is known by the arithmetic of its forward.

    source        reads the syntax tree of a function, if its file is what the function was compiled from
    expressions   turns a forward into one expression
    arithmetic    says which expression is which norm, and how a kernel is called for it
    strides       finds the order in memory of what a norm returns
    current       runs the forward that a class was given after the patch
    norms         makes classes of norms that call a kernel
    rewriting     compiles a forward again, with other statements
    layers        makes classes of layers whose norms add the residual
    rotary        says which function is a rotary embedding
    unchanging    says which code between the norms of q and k and their rotation changes nothing
    receivers     says what attention does with rotated q and k
    attention     makes classes of attention whose norms of q and k run with the rotary embedding
    folding       runs these norms and the rotary embedding, in one call where it can
    inplace       finds norms whose input is changed afterwards
    patch         gives a model's modules these classes, and takes them back
    report        lists the modules that were patched or declined, with reasons
    mapping       does the same for `kernelize` of the library `kernels`

None of these modules imports transformers.
"""

from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match
from tilegym_rmsnorm.integrations.huggingface.attention import AttentionPatch
from tilegym_rmsnorm.integrations.huggingface.layers import LayerPatch
from tilegym_rmsnorm.integrations.huggingface.mapping import kernel_mapping
from tilegym_rmsnorm.integrations.huggingface.norms import NormPatch, loaded_class
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
