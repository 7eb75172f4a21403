# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The command that times small calls beside PyTorch's."""

import re

import pytest
import torch

from bench.studies import small_calls

CPU = torch.device("cpu")


def test_every_pair_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes minutes
    assert small_calls.main(["--backend", "torch", "--rows", "4", "--columns", "64", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    for form in ("rms_norm", "with a residual", "with a bias", "y in float32", "heads, a slice"):
        for label in ("no grad", "recorded", "both passes"):
            assert re.search(rf"^{form}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    for form in ("RMSNorm", "a patched LlamaRMSNorm", "DTensors"):
        for label in ("no grad", "both passes"):
            assert re.search(rf"^{form}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    labels = "qk_norm_rope, both passes", "op qk_norm_rope_backward, beside a forward", "rms_norm, not known"
    for label in (*labels, "F.rms_norm, both passes", "trace of rms_norm", "trace of qk_norm_rope"):
        assert re.search(rf"^{label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out
    for kind in ("eager", "compiled"):
        for label in ("no grad", "both passes", "residuals, no grad", "residuals, both passes"):
            assert re.search(rf"^{kind}, {label}(?: +\d+\.\d){{2}} +\d+\.\d\d$", out, re.MULTILINE), out


@pytest.mark.parametrize("has_residual", [False, True])
def test_both_chains_compute_the_same(has_residual):
    chain = small_calls.Chain((4, 64), torch.float64, CPU, "torch")
    ours, theirs = (
        (chain.ours, chain.theirs)
        if not has_residual
        else (chain.ours_with_residual, chain.theirs_with_residual)
    )
    given = chain.x, chain.matrices, chain.weights
    torch.testing.assert_close(ours(*given), theirs(*given))


def test_pairs_compute_the_same():
    """Calls that return tensors are compared as they are timed."""
    size, dtype = (4, 64), torch.float32
    with small_calls.mesh_of_one(CPU) as mesh:
        pairs = (
            *small_calls.pairs_of_calls(size, dtype, CPU),
            *small_calls.pairs_of_modules(size, dtype, CPU),
            *small_calls.pairs_of_rope(4, dtype, CPU),
            *small_calls.pairs_of_first_calls(size, dtype, CPU),
            *small_calls.pairs_under_override(size, dtype, CPU),
            *small_calls.pairs_of_traces(size, dtype, CPU),
            *small_calls.pairs_of_dtensors(size, dtype, mesh),
        )
        for label, ours, theirs in pairs:
            if not label.startswith("op"):
                for a, b in zip(ours(), theirs(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=label)
