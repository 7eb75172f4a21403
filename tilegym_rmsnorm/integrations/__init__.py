# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the kernels where other code calls an RMSNorm. `import tilegym_rmsnorm` loads none of these modules.

aten            aten's fused ops, which F.rms_norm and nn.RMSNorm call
fx              the nodes of those ops in traced graphs
huggingface     the norms of a model, known by the arithmetic of their forward
all others      the names and signatures of the library that the module is named after
"""
