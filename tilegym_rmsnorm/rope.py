# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define `qk_norm_rope` and `rms_norm_rope`: check the arguments, choose a route (routes/), take it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function

from tilegym_rmsnorm.call.options import refuse_torch_jit_script
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.watched import has_torch_function, is_traced, untraced
from tilegym_rmsnorm.ops.rope.checks import checked_rope
from tilegym_rmsnorm.ops.rope.op import CALLS, rope_in_graph
from tilegym_rmsnorm.ops.rope.passes import known_call
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPTIONS, RopeOutputs, RopeRounding
from tilegym_rmsnorm.routes.public_calls import run_checked
from tilegym_rmsnorm.settings import BackendName


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    casting: Casting = "once",
    rope_rounding: RopeRounding = "end",
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize each head of q and k, and rotate its first elements by cos and sin: differentiable (twice).

    `n = x * rstd * (weight + offset)` over the D elements of a head, as `rms_norm`. Then each pair (i, j) of the first
    `rotary_dim` elements becomes `y[i] = n[i] * cos[i] - n[j] * sin[i]`, `y[j] = n[j] * cos[j] + n[i] * sin[j]`;
    the others stay. Computed in float32, in float64 for float64 tensors, and rounded once unless `casting` or
    `rope_rounding` says otherwise. Nothing is cast under autocast.

    The backward computes rstd again, so nothing is saved but the arguments. It is exact for any tables.

    Args:
        q: Shape `(B, T, Hq, D)` or `(T, Hq, D)`; float16, bfloat16, float32 or float64; any strides: a slice of a
            packed projection is read where it is. `(B, Hq, T, D)` cannot be told from it: pass `q.transpose(1, 2)`.
        k: Shape `(B, T, Hk, D)` or `(T, Hk, D)`, q's dtype and device.
        q_weight: Shape `(D,)`, or `(Hq, D)`, a row for each head; any of these dtypes. None: a factor of 1.
        k_weight: The same for k, `(D,)` or `(Hk, D)`.
        cos: Shape `(T, R)` or `(B, T, R)`, R = rotary_dim, a column for each rotated element; or R / 2 columns, one for
            each pair. With position_ids a table `(positions, R)` or `(positions, R / 2)`. float32 or q's dtype. No
            gradient reaches it.
        sin: As cos, of its shape and dtype.
        eps: None: the machine epsilon of float32, of float64 where q is float64.
        offset: Added to both weights: 1 for Gemma.
        rotary_dim: How many elements of a head are rotated, even. None: all D. Pass it where fewer are: tables of D / 2
            columns would be taken for one column a pair.
        interleaved: The pairs are elements (2i, 2i + 1), as in GPT-J. Else (i, i + rotary_dim / 2), as in GPT-NeoX and
            Llama.
        position_ids: Rows of cos and sin, int64 or int32, shape `(T,)` or `(B, T)`. A position outside of the table
            makes the rotated elements of its token NaN, and with them the gradients of the weights. None: row t is
            position t.
        casting: As for `rms_norm`: "llama" for Qwen3, "once" for Gemma 3.
        rope_rounding: `"end"`: only the result is rounded. `"norm"`: n is rounded to q's dtype too, as by a norm and a
            rotation in float32 behind it: vLLM's Qwen3.5, torchtitan's Qwen3. `"each"`: n, both products and their sum
            are rounded to q's dtype, as Hugging Face's models do.
        backend: A name or `"auto"`. None: the backend in effect, see `use_backend`.

    Returns:
        q_out and k_out, contiguous, of the shapes and dtype of q and k.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    tensors = q, k, q_weight, k_weight, cos, sin, position_ids
    numbers = eps, offset, rotary_dim, interleaved, casting, rope_rounding
    described = None
    if is_traced():
        if k is not None and (result := rope_in_graph(tensors, numbers, backend)) is not None:
            return result
    elif (known := CALLS.known.find(described := known_call(tensors, numbers, backend))) is not None:
        return known(tensors)
    if has_torch_function(*tensors):
        options = _named(numbers, position_ids, backend)
        return handle_torch_function(qk_norm_rope, tensors, *tensors[:-1], **options)
    if k is None:
        raise TypeError("k: expected a torch.Tensor, got NoneType: rms_norm_rope takes one tensor")
    return _checked(tensors, numbers, backend, described)  # type: ignore[return-value]


def rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    casting: Casting = "once",
    rope_rounding: RopeRounding = "end",
    backend: BackendName | None = None,
) -> Tensor:
    """Compute `qk_norm_rope` of one tensor.

    Args:
        x: As q of `qk_norm_rope`: shape `(B, T, H, D)` or `(T, H, D)`.
        weight: Shape `(D,)` or `(H, D)`, or None.
        cos: As for `qk_norm_rope`.
        sin: As for `qk_norm_rope`.
        eps: As for `qk_norm_rope`.
        offset: As for `qk_norm_rope`.
        rotary_dim: As for `qk_norm_rope`.
        interleaved: As for `qk_norm_rope`.
        position_ids: As for `qk_norm_rope`.
        casting: As for `qk_norm_rope`.
        rope_rounding: As for `qk_norm_rope`.
        backend: As for `qk_norm_rope`.

    Returns:
        y, contiguous, of x's shape and dtype.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    tensors = x, None, weight, None, cos, sin, position_ids
    numbers = eps, offset, rotary_dim, interleaved, casting, rope_rounding
    described = None
    if is_traced():
        if (result := rope_in_graph(tensors, numbers, backend)) is not None:
            return result[0]
    elif (known := CALLS.known.find(described := known_call(tensors, numbers, backend))) is not None:
        return known(tensors)[0]
    if has_torch_function(*tensors):
        given, options = (x, weight, cos, sin), _named(numbers, position_ids, backend)
        return handle_torch_function(rms_norm_rope, tensors, *given, **options)
    return _checked(tensors, numbers, backend, described)[0]


qk_norm_rope.__prepare_scriptable__ = refuse_torch_jit_script  # type: ignore[attr-defined]
rms_norm_rope.__prepare_scriptable__ = refuse_torch_jit_script  # type: ignore[attr-defined]


def _named(numbers: tuple[Any, ...], position_ids: Any, backend: Any) -> dict[str, Any]:
    return dict(zip(ROPE_OPTIONS, numbers, strict=True)) | {"position_ids": position_ids, "backend": backend}


def _checked(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: str | None, described: Any = None
) -> RopeOutputs:
    """Run a call with all checks; Dynamo traces this. The result has None in the place of k_out where k is None."""
    checked = checked_rope(tensors, numbers)
    return run_checked(CALLS, tensors, numbers, backend, described, checked, _untraced_checked)


_untraced_checked = untraced(_checked)
