# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of qk_norm_rope and rms_norm_rope that are refused, and what the errors say."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE
from rope_calls import case, ours

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope


def test_a_saved_tensor_that_changed_is_refused():
    q, *others = case()
    leaf = q.requires_grad_()
    q_out, k_out = ours(leaf, *others)
    leaf.data = torch.randn(2, 5, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="k: expected shape"):
        (q_out.sum() + k_out.sum()).backward()


Q, K, W, COS = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 2, 8), torch.ones(8), torch.ones(5, 8)
POSITIONS = torch.zeros(5, dtype=torch.int64)
BAD = [
    ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"q": Q.long()}, TypeError, "q: expected a dtype of"),
    ({"q": torch.ones(5, 8)}, ValueError, r"q: expected shape \(B, T, H, D\) or \(T, H, D\)"),
    ({"k": K[:, :4]}, ValueError, r"k: expected shape \(2, 5, any number of heads, 8\)"),
    ({"k": torch.ones(2, 5, 2, 4)}, ValueError, "k: expected shape"),
    ({"k": K.double()}, TypeError, "k: expected the dtype of q, torch.float32, got torch.float64"),
    ({"k": K[0]}, ValueError, "k: expected shape"),
    (
        {"q_weight": torch.ones(4)},
        ValueError,
        r"q_weight: expected shape \(8,\), or \(4, 8\) of the heads of q",
    ),
    ({"q_weight": torch.ones(2, 8)}, ValueError, r"q_weight: expected shape \(8,\), or \(4, 8\)"),
    ({"k_weight": torch.ones(4, 8)}, ValueError, r"k_weight: expected shape \(8,\), or \(2, 8\)"),
    ({"k_weight": 1.0}, TypeError, "k_weight: expected a torch.Tensor or None, got float"),
    ({"q_weight": W.to("meta")}, ValueError, "q_weight: expected the device of q"),
    (
        {"cos": torch.ones(5, 5), "sin": torch.ones(5, 5)},
        ValueError,
        "expected 8 columns, one for each rotated element, or 4",
    ),
    ({"cos": torch.ones(4, 8)}, ValueError, "sin: expected shape and dtype of cos"),
    ({"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}, ValueError, "q of shape .* has 5 positions"),
    (
        {"cos": torch.ones(3, 5, 8), "sin": torch.ones(3, 5, 8)},
        ValueError,
        r"cos: expected shape \(5, 8\), \(1, 5, 8\) or \(2, 5, 8\)",
    ),
    ({"cos": COS.half()}, TypeError, r"cos: expected torch.float32, got torch.float16: pass cos.float\(\)"),
    (
        {"cos": COS.clone().requires_grad_()},
        ValueError,
        r"cos: expected a table without a gradient: detach\(\) it",
    ),
    ({"sin": COS.clone().requires_grad_()}, ValueError, "sin: expected a table without a gradient"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim: expected an even number up to D, 8, got 3"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim: expected an even number up to D, 8, got 10"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim: expected at least 2, or None, got 0"),
    ({"rotary_dim": 4.0}, TypeError, "rotary_dim: expected an int or None"),
    ({"interleaved": 1}, TypeError, "interleaved: expected a bool"),
    (
        {"position_ids": POSITIONS.short()},
        TypeError,
        r"expected torch.int64 or torch.int32, got torch.int16: pass position_ids.long\(\)",
    ),
    (
        {"position_ids": POSITIONS.float()},
        TypeError,
        r"expected torch.int64 or torch.int32, got torch.float32$",
    ),
    ({"position_ids": POSITIONS.bool()}, TypeError, r"expected torch.int64 or torch.int32, got torch.bool$"),
    (
        {"position_ids": POSITIONS[:4]},
        ValueError,
        r"position_ids: expected shape \(5,\), \(1, 5\) or \(2, 5\)",
    ),
    ({"position_ids": POSITIONS.to_sparse()}, TypeError, "position_ids: expected layout torch.strided"),
    ({"cos": COS.to_sparse()}, TypeError, "cos: expected layout torch.strided"),
    ({"position_ids": [0]}, TypeError, "position_ids: expected a torch.Tensor or None"),
    (
        {"position_ids": POSITIONS, "cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)},
        ValueError,
        "cos: expected two dimensions",
    ),
    ({"rope_rounding": "all"}, ValueError, "rope_rounding: expected one of 'end', 'norm', 'each'"),
    ({"casting": "none"}, ValueError, "casting: expected one of"),
    ({"eps": -1.0}, ValueError, "eps: expected a finite number"),
    ({"offset": "1"}, TypeError, "offset: expected a finite number"),
    ({"backend": "cuda"}, ValueError, "backend"),
    ({"cos": [1.0]}, TypeError, "cos: expected a torch.Tensor, got list"),
    ({"cos": COS.long(), "sin": COS.long()}, TypeError, "cos: expected torch.float32, got torch.int64"),
    (
        {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8)},
        ValueError,
        r"row i is of position i, pass cos\[p:p \+ 5\] for positions from p on, or position_ids$",
    ),
    (
        {"cos": torch.ones(10, 8), "sin": torch.ones(10, 8)},
        ValueError,
        r"if q and k are \(B, T, H, D\) and each sequence has rows of its own, .* view cos and sin as \(2, 5, 8\);",
    ),
    (
        {"q": torch.ones(2, 4, 5, 8)},
        ValueError,
        r"if q is \(B, H, T, D\) and k is \(B, T, H, D\), pass q.transpose\(1, 2\)$",
    ),
    (
        {"q": Q.transpose(1, 2), "k": torch.ones(2, 4, 5, 8)},
        ValueError,
        r"if q and k are \(B, H, T, D\), pass q.transpose\(1, 2\) and k.transpose\(1, 2\)$",
    ),
    ({"q": torch.ones(2, 5, 32), "k": torch.ones(2, 5, 16)}, ValueError, r"view them as \(B, T, H, D\)"),
    ({"q": torch.ones(2, 5, 16), "k": torch.ones(2, 5, 16)}, ValueError, r"view them as \(B, T, H, D\)"),
    (
        {"cos": torch.ones(5, 2), "sin": torch.ones(5, 2)},
        ValueError,
        "a part of each head is rotated, pass rotary_dim=2, if they are one for each rotated element, or 4, if one for "
        "each pair$",
    ),
    ({"position_ids": POSITIONS, "cos": COS[:0], "sin": COS[:0]}, ValueError, "a position at least"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_errors(changes, error, text):
    given = {"q": Q, "k": K, "q_weight": W, "k_weight": W, "cos": COS, "sin": COS} | changes
    with pytest.raises(error, match=text):
        qk_norm_rope(**given)
    # also where an earlier call was right: a number of another type, which equals one of a known call, is refused
    qk_norm_rope(Q, K, W, W, COS, COS)
    with pytest.raises(error, match=text):
        qk_norm_rope(**given)


def test_errors_name_the_arguments_of_one_tensor():
    with pytest.raises(ValueError, match=r"^weight: expected shape \(8,\), or \(4, 8\) of the heads of x"):
        rms_norm_rope(Q, torch.ones(3), COS, COS)
    with pytest.raises(ValueError, match="^x: expected shape"):
        rms_norm_rope(COS, W, COS, COS)
    odd = torch.ones(2, 5, 4, 7)
    with pytest.raises(
        ValueError, match="rotary_dim: expected an even number of elements, since D, 7, is odd"
    ):
        rms_norm_rope(odd, None, COS[:, :7], COS[:, :7])


def test_no_gradient_of_k_without_k():
    given = Q[..., :1, :], torch.ones(3), Q[..., :1, :], None, None, None, COS, COS, None, 0
    with pytest.raises(ValueError, match="dk_out: expected None without k, got a Tensor"):
        torch.ops.tilegym_rmsnorm.qk_norm_rope_backward(*given, 1e-6, 0.0, 8, False, "once", "end", None)


def test_k_is_no_option():
    with pytest.raises(
        TypeError, match="k: expected a torch.Tensor, got NoneType: rms_norm_rope takes one tensor"
    ):
        qk_norm_rope(Q, None, W, None, COS, COS)
