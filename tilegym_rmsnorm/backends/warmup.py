# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compile the kernels of given widths and dtypes before the first step, so that no later call compiles: `warmup`, and
`warmup_rope` for `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tilegym_rmsnorm.backends.contract import Request
from tilegym_rmsnorm.backends.refusals import tensors_unusable
from tilegym_rmsnorm.backends.registry import BackendUnavailableError, request_of, why_unusable
from tilegym_rmsnorm.call.options import (
    check_casting,
    checked_bool,
    checked_heads,
    checked_int,
    checked_number,
)
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.validation import check_residual, checked_dtype
from tilegym_rmsnorm.ops.rope.checks import ANY_POSITION_DTYPE, POSITION_DTYPES, checked_rope
from tilegym_rmsnorm.ops.rope.spec import RopeRounding
from tilegym_rmsnorm.reproducibility import flags

Width = tuple[int, torch.dtype] | tuple[int, torch.dtype, torch.dtype | None]


def warmup(
    widths: Width | Iterable[Width],
    *,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    heads: int | None = None,
    strided_heads: int | None = None,
    casting: Casting = "once",
    device: torch.device | str | None = None,
) -> None:
    """Compile the kernels of backend "cutile" that the forward and the backward of these widths need, for any M.

    Afterwards such a call with contiguous rows compiles nothing, whatever its number of rows, and loads nothing from
    the disk cache. A call that differs in one of these arguments needs a warmup of its own: the first norm of a model
    has no residual, the others have one. Kernels are compiled for the gradients of all tensors; with a residual, y or
    residual_out may be unused. Needs a few times 100 MB of the device's memory while it runs.

    Args:
        widths: A sequence of `(n, dtype of x)` or `(n, dtype of x, dtype of weight)`, or one of these alone. None as
            dtype of weight: no weight.
        bias: The dtype of bias. None: no bias.
        residual: The dtype of residual. None: no residual.
        residual_alpha: As for `rms_norm`; only whether it is 1 matters.
        residual_dtype: As for `rms_norm`.
        out_dtype: As for `rms_norm`.
        heads: H of weight and bias of shape `(H, n)`, as those of `RMSNorm(heads=H)`, on x of shape `(*, H, n)`.
        strided_heads: H of x of shape `(*, H, n)` beside a weight of shape `(n,)`: also compile for x, residual or
            gradients that are not contiguous, such as q in `qkv[:, :, 0]`. `heads` includes such calls. Either way n
            elements of each tensor, and its strides, must fill a multiple of 16 bytes.
        casting: As for `rms_norm`; eps and offset do not matter.
        device: Default: the current CUDA device.

    Raises:
        BackendUnavailableError: The backend cannot run there.
        ValueError: A width or a device that has no kernels; a number out of range; residual_alpha or residual_dtype
            without residual; heads together with strided_heads.
        TypeError: widths is not a sequence of widths, or a dtype has no kernels.
    """
    check_casting(casting)
    requests = [_checked(width) for width in _each(widths)]
    for name, dtype in (("bias", bias), ("residual", residual), ("out_dtype", out_dtype)):
        checked_dtype(name, dtype)
    residual_alpha = checked_number("residual_alpha", residual_alpha)
    if residual is None:
        check_residual(torch.empty(0, device="meta"), None, residual_alpha, residual_dtype)
    checked_dtype("residual_dtype", residual_dtype)
    per_head, apart = checked_heads(heads), checked_heads(strided_heads, "strided_heads")
    if per_head is not None and apart is not None:
        raise ValueError(f"strided_heads: expected None beside heads, whose rows may lie so too, got {apart}")
    device = _cuda_device(device)
    more = bias, residual, residual_dtype, out_dtype
    for n, dtype, weight_dtype in requests:
        _check_usable("warmup", device, casting, n, dtype, weight_dtype, *more)
    from tilegym_rmsnorm.backends.cutile.host.warm import Calls, warm

    device = _numbered(device)
    for n, dtype, weight_dtype in requests:
        total = None if residual is None else residual_dtype or torch.promote_types(dtype, residual)
        asked = n, dtype, weight_dtype, casting, bias, residual, total, residual_alpha, out_dtype
        if per_head is None:
            warm(device, Calls(*asked))
        if (count := per_head or apart) is not None:
            warm(device, Calls(*asked, heads=count, per_head=per_head is not None))
    torch.cuda.synchronize(device)


def warmup_rope(
    width: Width,
    *,
    heads: int,
    k_heads: int | None = None,
    per_head: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    table_dtype: torch.dtype | None = None,
    half_tables: bool = False,
    positions: int | None = None,
    position_dtype: torch.dtype = torch.int64,
    casting: Casting = "once",
    rope_rounding: RopeRounding = "end",
    device: torch.device | str | None = None,
) -> None:
    """Compile the kernels of backend "cutile" that `qk_norm_rope` and its backward need, for any B and T.

    Afterwards such a call compiles nothing, and loads nothing from the disk cache: whether q and k are contiguous or
    slices of a packed projection, gradients contiguous or transposed, cos and sin the same for all sequences or not. A
    call that differs in one of these arguments needs a warmup of its own. Kernels are compiled for the gradients of all
    tensors. The rows of each tensor must fill a multiple of 16 bytes.

    Args:
        width: `(D, dtype of q and k)` or `(D, dtype of q and k, dtype of the weights)`. None as dtype of the weights:
            no weights.
        heads: Hq.
        k_heads: Hk. None: calls of `rms_norm_rope`.
        per_head: The weights have shape `(H, D)`.
        rotary_dim: As for `qk_norm_rope`.
        interleaved: As for `qk_norm_rope`.
        table_dtype: The dtype of cos and sin. None: float32.
        half_tables: cos and sin have R / 2 columns.
        positions: The number of rows of cos and sin beside position_ids. None: no position_ids.
        position_dtype: The dtype of position_ids, int64 or int32.
        casting: As for `qk_norm_rope`; eps and offset do not matter.
        rope_rounding: As for `qk_norm_rope`.
        device: Default: the current CUDA device.

    Raises:
        BackendUnavailableError: The backend cannot run there.
        ValueError: A width or a device that has no kernels; a number out of range.
        TypeError: width is none, or a dtype has no kernels.
    """
    n, dtype, weight_dtype = _checked(width, "width")
    count, k_count = checked_int("heads", heads, 1), checked_heads(k_heads, "k_heads") or 0
    table_dtype = checked_dtype("table_dtype", table_dtype) or torch.float32
    rows = 0 if positions is None else checked_int("positions", positions, 1, ", or None")
    if position_dtype not in POSITION_DTYPES:
        raise TypeError(f"position_dtype: expected {ANY_POSITION_DTYPE}, got {position_dtype!r}")
    columns = n if rotary_dim is None else checked_int("rotary_dim", rotary_dim, 2, ", or None")
    columns //= 2 if checked_bool("half_tables", half_tables) else 1
    q, k = (torch.empty(1, 1, each, n, dtype=dtype, device="meta") for each in (count, k_count))
    table = torch.empty(1, columns, dtype=table_dtype, device="meta")
    numbers = None, 0.0, rotary_dim, interleaved, casting, rope_rounding
    spec = checked_rope((q, k if k_count else None, None, None, table, table, None), numbers).spec
    is_per_head = checked_bool("per_head", per_head)
    device = _cuda_device(device)
    _check_usable("warmup_rope", device, casting, n, dtype, weight_dtype, table_dtype)
    from tilegym_rmsnorm.backends.cutile.host.warm import warm
    from tilegym_rmsnorm.backends.cutile.host.warm_rope import RopeCalls

    device, of_weight = _numbered(device), (weight_dtype, count, k_count, is_per_head)
    warm(device, RopeCalls(spec, dtype, *of_weight, table_dtype, columns, rows, position_dtype))
    torch.cuda.synchronize(device)


def _cuda_device(device: torch.device | str | None) -> torch.device:
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}: nothing is compiled for others")
    return device


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _check_usable(
    function: str, device: torch.device, casting: str, n: int, dtype: torch.dtype, *others: torch.dtype | None
) -> None:
    """Raise BackendUnavailableError where the backend cannot run such calls. others: the dtype of weight first."""
    is_aligned = n * dtype.itemsize % 16 == 0
    request = request_of(device, casting, None, dtype, *others, n=n, is_aligned=is_aligned, level=flags())
    if unusable := why_unusable("cutile", request):
        raise BackendUnavailableError(f"{function}: {unusable.reason}. To mend it: {unusable.remedy}")


def _each(widths: object) -> Iterator[object]:
    """Iterate over the widths. A width alone is told from a sequence of widths by the dtype in its second place."""
    if isinstance(widths, tuple) and len(widths) in (2, 3) and isinstance(widths[1], torch.dtype):
        return iter((widths,))
    if not isinstance(widths, Iterable) or isinstance(widths, str):
        expected = "a sequence of (n, dtype) or (n, dtype, weight dtype), such as [(4096, torch.bfloat16)]"
        raise TypeError(f"widths: expected {expected}, got {widths!r}")
    return iter(widths)


def _checked(width: object, name: str = "widths") -> tuple[int, torch.dtype, torch.dtype | None]:
    if not isinstance(width, tuple) or len(width) not in (2, 3):
        raise TypeError(f"{name}: expected (n, dtype) or (n, dtype, weight dtype), got {width!r}")
    n, dtype, weight_dtype = width if len(width) == 3 else (*width, width[1])
    if type(n) is not int or n < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1 as n, got {n!r}")
    if not isinstance(dtype, torch.dtype) or not isinstance(weight_dtype, torch.dtype | None):
        raise TypeError(f"{name}: expected dtypes of torch, got {width!r}")
    if problem := tensors_unusable(Request(torch.device("cuda"), dtype, weight_dtype, "once")):
        raise TypeError(
            f"{name}: expected dtypes that there are kernels for, got {width!r}: {problem.reason}"
        )
    return n, dtype, weight_dtype
