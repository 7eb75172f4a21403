# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls that a type checker accepts, and calls that it refuses: scripts/readme_types.py checks this file, and mypy
reports an ignored error that it does not find. Nothing runs it."""

import torch

from tilegym_rmsnorm import (
    Override,
    PatchReport,
    RMSNorm,
    override_aten,
    patch_model,
    rms_norm,
    use_backend,
    warmup,
    warmup_rope,
)
from tilegym_rmsnorm.integrations import liger

x = torch.randn(2, 4)
bf16 = torch.bfloat16
rms_norm(x, 4, None, 1e-6, backend="torch")
norm = RMSNorm(4, offset=1.0, casting="llama")
RMSNorm((4, 8))
RMSNorm([4, 8])
warmup((4096, bf16))
warmup([(4096, bf16), (64, bf16, None)])
warmup((n, bf16) for n in (64, 128))
warmup_rope((128, bf16, torch.float32), heads=32, k_heads=8, rope_rounding="norm")
warmup_rope((128, bf16), heads=32, positions=4096, position_dtype=torch.int32)
y: torch.Tensor = norm(x).float()
total: torch.Tensor = norm(x, x)[1].float()
with use_backend("torch"):
    rms_norm(x, 4, backend="cutile")
backend: str = "tri" + "ton"
RMSNorm(4, backend=backend)
report: PatchReport = patch_model(torch.nn.Linear(4, 4))
override: Override = override_aten("cpu")
liger.LigerRMSNormForGlm4(8, 1e-5, 0.0, "llama", "ones", True, row_mode=None)

norm(x).nothing()  # type: ignore
norm(x, x)[0].nothing()  # type: ignore
norm(x, x).float()  # type: ignore
norm("x")  # type: ignore
RMSNorm("8")  # type: ignore
RMSNorm(4, backend=1)  # type: ignore
rms_norm(x, 4, backend=["torch"])  # type: ignore
RMSNorm(4, casting="Llama")  # type: ignore
RMSNorm(4, offset="1")  # type: ignore
rms_norm(x, "a")  # type: ignore
rms_norm(x, 4, casting="gemma")  # type: ignore
rms_norm(x, (4,), eps="small")  # type: ignore
use_backend(None)  # type: ignore
warmup(4096)  # type: ignore
warmup([4096])  # type: ignore
warmup((64, bf16), casting="none")  # type: ignore
warmup_rope((64, bf16))  # type: ignore
liger.LigerRMSNormForGemma(8, elementwise_affine=False)  # type: ignore
liger.LigerRMSNormForGemma3(8, offset="x")  # type: ignore
