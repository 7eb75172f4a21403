# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What `torch.jit.script` compiles in the place of `rms_norm`: the formula of reference.py, in TorchScript.

The reference itself is no TorchScript: it looks up dtypes by torch.finfo and asks what compiles it.
"""

import torch
from torch import Tensor


def scripted_rms_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    eps: float | None,
    bias: Tensor | None,
    offset: float,
    casting: str,
) -> Tensor:
    """y of x's shape and dtype; shapes and dtypes as for `rms_norm`, without a residual."""
    if bias is None and offset == 0.0 and casting == "once":
        return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)
    dims = len(normalized_shape)
    if x.dim() < dims or x.shape[x.dim() - dims :] != normalized_shape:
        raise ValueError(
            f"input: expected shape (*, {normalized_shape}), as normalized_shape says, got {x.shape}"
        )
    if x.is_complex():  # in its own precision: there is nothing to widen or to round
        y = torch.nn.functional.rms_norm(x, normalized_shape, None, eps)
        if weight is not None:
            y = y * (weight + offset)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)
    is_double = x.dtype == torch.float64
    if eps is None:
        eps = 2.0**-52 if is_double else 2.0**-23  # the machine epsilons of float64 and float32
    wide = x.to(torch.float64 if is_double else torch.float32)
    last_dims = list(range(-dims, 0))
    rstd = torch.rsqrt(wide.square().mean(last_dims, keepdim=True) + eps)

    if weight is not None:
        is_double = is_double or weight.dtype == torch.float64
    if bias is not None:
        is_double = is_double or bias.dtype == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    y = wide.to(dtype) * rstd.to(dtype)  # x is widened once, so that its gradient is rounded once
    if casting == "llama":
        # Exactly the rounded value; autograd of y.to(x.dtype) would round the gradient too.
        y = y + (y.to(x.dtype).to(dtype) - y).detach()
    if weight is not None:
        y = y * (weight.to(dtype) + offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype)
