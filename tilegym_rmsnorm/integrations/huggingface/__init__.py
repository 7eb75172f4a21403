# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The norms of Hugging Face's models, and of code like theirs, by the arithmetic of their forward.

    source        the syntax tree of a function, where its file is what it was compiled from
    expressions   what a forward returns, as an expression
    arithmetic    which expressions are which norm, and how a kernel is called for it
    norms         classes of norms that call a kernel
    layers        classes of layers whose norms add the residual
    inplace       norms whose input is changed afterwards
    patch         gives a model's modules those classes, and takes them back
    report        what was done, and what was declined for which reason
    mapping       the same for `kernelize` of the library `kernels`

None of it imports transformers.
"""

from tilegym_rmsnorm.integrations.huggingface.mapping import kernel_mapping
from tilegym_rmsnorm.integrations.huggingface.report import PatchReport

__all__ = ["PatchReport", "kernel_mapping"]
