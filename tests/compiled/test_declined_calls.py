# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Where `norm_in_graph` declines a call, Dynamo traces it once, then all checks."""

import pytest
import torch
from helpers import FP32
from llama_like import LlamaLikeNorm
from torch import nn

import tilegym_rmsnorm.nn.module
from tilegym_rmsnorm import RMSNorm, functional, patch_model, rms_norm
from tilegym_rmsnorm.integrations.huggingface import norms

N = 8
X, W = torch.randn(3, 4, N), torch.rand(N)


def of_patched():
    model = nn.Sequential(LlamaLikeNorm(N, FP32))
    assert len(patch_model(model, backend="torch").patched) == 1
    return model


CALLS = {
    "rms_norm": lambda: lambda x: rms_norm(x, N, W, backend="torch"),
    "RMSNorm": lambda: RMSNorm(N, bias=True, backend="torch"),
    "a patched norm": of_patched,
    "a patched norm, of rows that are not packed": lambda: (lambda norm: lambda x: norm(x.transpose(0, 1)))(
        of_patched()
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", CALLS)
def test_a_declined_call_is_traced_once(name, monkeypatch):
    traced = []

    @torch.compiler.assume_constant_result
    def note():
        traced.append(name)

    def noted(*given):
        note()
        return original(*given)

    original = functional.norm_in_graph
    for module in (functional, tilegym_rmsnorm.nn.module, norms):
        monkeypatch.setattr(module, "norm_in_graph", noted)
    call = CALLS[name]()
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(X), call(X))
    assert len(traced) == 1
