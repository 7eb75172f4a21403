# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rope_rounding and casting of qk_norm_rope: which numbers are rounded on the way, and that gradients ignore it."""

from __future__ import annotations

import pytest
import rope_calls
import torch
from helpers import BF16, DEVICE, FP16, FP32
from rope_calls import both_passes, case, ours


def as_hugging_face(q, k, q_weight, k_weight, cos, sin, casting, in_float32=False):
    """Each operation rounded, as in models of Hugging Face's. in_float32: as where these rotate images, all of the
    rotation in float32 and rounded once."""

    def normalized(x, weight):
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rope_calls.EPS)
        if casting == "llama":
            return weight * xhat.to(x.dtype)
        return (xhat * weight.float()).to(x.dtype)

    def rotated_half(x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    cos, sin = cos[:, None], sin[:, None]
    outputs = (normalized(x, w) for x, w in ((q, q_weight), (k, k_weight)))
    outputs = (n.float() for n in outputs) if in_float32 else outputs
    return tuple((n * cos + rotated_half(n) * sin).to(q.dtype) for n in outputs)


@pytest.mark.parametrize("rounding", ["norm", "each"])
@pytest.mark.parametrize("casting", ["llama", "once"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_roundings_have_the_bits_of_hugging_face(dtype, casting, rounding):
    *tensors, cos, sin = case(dtype=dtype, t=64, d=64)
    tensors = *tensors, cos.to(dtype), sin.to(dtype)
    got = ours(*tensors, casting=casting, rope_rounding=rounding, backend="torch")
    want = as_hugging_face(*tensors, casting, in_float32=rounding == "norm")
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


ROUNDED_FORMS = {
    "plain": ({"tables": "BT"}, {}),
    "partial": ({"r": 48, "weights": "heads"}, {"rotary_dim": 48, "offset": 1.0}),
    "interleaved": ({"half": True, "weights": "float32"}, {"interleaved": True}),
    "partial interleaved": ({"r": 32, "weights": "none"}, {"rotary_dim": 32, "interleaved": True}),
    "positions": ({"tables": "positions", "half": True}, {"offset": 1.0}),
}


@pytest.mark.parametrize("casting", ["llama", "once"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ROUNDED_FORMS)
def test_the_norm_is_rounded_and_the_result_once(name, dtype, casting, backend):
    """As a norm that returns q's dtype, and behind it a rotation in float32. Not bit by bit: another rstd may turn a
    rounding over, and the sum is of float32."""
    made, options = ROUNDED_FORMS[name]
    tensors = case(dtype=dtype, d=64, **made)
    options = options | {"casting": casting}
    if made.get("tables") == "positions":
        options["position_ids"] = torch.randint(0, 8, (2, 5), device=DEVICE)
    got = ours(*tensors, rope_rounding="norm", backend=backend, **options)
    for one, of_norm, of_end in zip(
        got,
        rope_calls.expected(*tensors, rope_rounding="norm", **options),
        rope_calls.expected(*tensors, rope_rounding="end", **options),
        strict=True,
    ):
        shares = [(one == each.to(dtype)).double().mean().item() for each in (of_norm, of_end)]
        # with casting="llama" and no weight n is xhat, which has q's dtype
        is_other = casting == "once" or made.get("weights") != "none"
        assert shares[0] > 0.99 and (shares[1] < 0.9) is is_other, shares


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients_ignore_the_rounding_of_the_norm(dtype, backend):
    tensors = case(dtype=dtype, d=64)
    plain, rounded = (
        both_passes(ours, tensors, rope_rounding=each, backend=backend) for each in ("end", "norm")
    )
    assert not torch.equal(plain[0], rounded[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[2:], rounded[2:], strict=True))
