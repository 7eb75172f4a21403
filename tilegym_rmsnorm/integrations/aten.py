# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Override aten's fused RMSNorm, which F.rms_norm and nn.RMSNorm call, by the kernels of this package.

A patch registers a kernel for both ops, forward and backward, at the dispatch key of a device. PyTorch's dispatcher
keeps a stack of kernels for each key, and calls the one registered last. Autograd, forward mode, vmap and DTensor have
higher keys and stay PyTorch's: a patch runs on plain tensors and declines all others.

A patch gets the kernel below it when it is registered, and calls that kernel for all that the patch declines. Kernels
registered later may do the same, and fail once the kernel that they hold is deregistered. So undoing a patch that is
not the last one registered does not deregister it: the patch declines all calls until it is the last one.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.library import Library

from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.backends.registry import MOST_CHOICES, dispatch, request_of, why_unusable
from tilegym_rmsnorm.call.arithmetic import default_eps
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.tensors import PLAIN_TYPES, are_aligned, is_plain
from tilegym_rmsnorm.ops.norm import passes, reference
from tilegym_rmsnorm.ops.norm.op import bind_op_forward
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, Spec, Wanted, shape_of_rstd
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.routes.known_calls import run_and_remember, shared
from tilegym_rmsnorm.settings import KERNEL_BACKENDS, get_current_backend

ATEN_FORWARD, ATEN_BACKWARD = "_fused_rms_norm", "_fused_rms_norm_backward"
ATEN_SCHEMAS = {
    ATEN_FORWARD: "(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    ATEN_BACKWARD: "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)",
}
DISPATCH_KEYS = {"cuda": "CUDA", "cpu": "CPU"}
TAKEN = "taken"

_DEFAULT_EPS = default_eps(torch.float32)  # aten uses this one for all three dtypes
_FLOAT32, _INF = torch.float32, math.inf
_UNKNOWN: Any = object()
_is_copied_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]

_lock = threading.RLock()
_FORWARDS, _BACKWARDS = shared(), shared()
_patches: dict[str, list[_Patch]] = {"cuda": [], "cpu": []}  # in the order of registration


@torch._disable_dynamo  # torch.compiler.disable would import Dynamo with this module
def _call_untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class Override:
    """An override that is in effect until `undo`, or the end of its `with` block. See `override_aten`."""

    __module__ = "tilegym_rmsnorm"

    def __init__(self, patch: _Patch) -> None:
        self._patch: _Patch | None = patch
        self._before = patch.snapshot()
        self._after: dict[str, dict[str, int]] | None = None

    @property
    def stats(self) -> dict[str, dict[str, int]]:
        """Count the calls of each op that were "taken", and those declined, by reason (docs/aten.md lists the reasons).
        Counts begin when this override is made and end when it is undone. Some calls may be missing where calls end at
        the same time in several threads."""
        counts = self._after if self._patch is None else self._patch.snapshot()
        assert counts is not None
        return {
            op: {what: n - self._before[op].get(what, 0) for what, n in of_op.items()}
            for op, of_op in counts.items()
        }

    def undo(self) -> None:
        """End the override. After the last override of a device has ended, the earlier kernels run again. A second
        call does nothing."""
        with _lock:
            if self._patch is None:
                return
            patch, self._after, self._patch = self._patch, self._patch.snapshot(), None
            patch.holders -= 1
            _remove_unused(_patches[patch.device_type])

    def __enter__(self) -> Override:
        if self._patch is None:
            raise RuntimeError("this override was undone; call override_aten() for another one")
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def override(device_type: str) -> Override:
    """Check the device and the PyTorch release for `override_aten`, and register a patch or share the last one."""
    if not isinstance(device_type, str) or device_type not in DISPATCH_KEYS:
        expected = " or ".join(map(repr, DISPATCH_KEYS))
        ends = ""
        if device_type is False or device_type is None:
            ends = "; undo() of what override_aten returned ends it"
        elif isinstance(device_type, torch.device):
            ends = ": pass its type"
        raise ValueError(f"device_type: expected {expected}, got {device_type!r}{ends}")
    _check_torch(device_type)
    with _lock:
        patches = _patches[device_type]
        _remove_unused(patches)
        if not patches or not patches[-1].is_called_first():
            patches.append(_Patch(device_type))
        patches[-1].holders += 1
        return Override(patches[-1])


def _check_torch(device_type: str) -> None:
    if device_type == "cuda" and torch.version.cuda is None:
        raise RuntimeError(
            f"override_aten: this PyTorch, {torch.__version__}, was built without CUDA, and has no kernel to override. "
            "Install a CUDA build of PyTorch, as https://pytorch.org/get-started says"
        )
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"override_aten needs torch.library.get_kernel, which PyTorch has from 2.9 on, not {torch.__version__}"
        )
    for op, schema in ATEN_SCHEMAS.items():
        found = getattr(torch.ops.aten, op).default._schema
        if str(found) != f"aten::{op}{schema}":
            raise RuntimeError(
                f"override_aten knows aten::{op} as PyTorch 2.9 to 2.14 have it; {torch.__version__} has {found}"
            )


def _remove_unused(patches: list[_Patch]) -> None:
    while patches and not patches[-1].holders and patches[-1].is_called_first():
        patches.pop().deregister()


class _Implementation(NamedTuple):
    function: Callable[..., Any]
    backend: str


class _Patch:
    """Kernels for both ops at one dispatch key, registered from construction to `deregister`."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = DISPATCH_KEYS[device_type]
        self.holders = 0  # overrides in effect; at 0 the patch declines all calls
        self.counts: dict[str, dict[str, int]] = {ATEN_FORWARD: {TAKEN: 0}, ATEN_BACKWARD: {TAKEN: 0}}
        self._implementations: dict[tuple[Any, ...], _Implementation | None] = {}
        self._below = {op: _kernel(op, self.key) for op in ATEN_SCHEMAS}
        self._library = Library("aten", "IMPL", self.key)
        try:
            with warnings.catch_warnings():
                # PyTorch warns, once in a process, that a kernel is overridden: users asked for that.
                warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
                for op, function in ((ATEN_FORWARD, self._forward), (ATEN_BACKWARD, self._backward)):
                    # allow_override is passed because its default differs between releases.
                    self._library.impl(op, function, self.key, with_keyset=True, allow_override=True)
        except BaseException:
            self.deregister()
            raise

    def deregister(self) -> None:
        self._library._destroy()
        # Tracers in Python cache the kernel of an op and key, and would keep the one that is gone.
        for op in ATEN_SCHEMAS:
            getattr(torch.ops.aten, op).default._dispatch_cache.clear()

    def is_called_first(self) -> bool:
        """Return whether the dispatcher calls kernels registered from this file, which are those of the last patch.
        False where this PyTorch does not say where a kernel was registered."""
        here = f"registered at {_kernel.__code__.co_filename}:"
        return all(here in repr(_kernel(op, self.key)) for op in ATEN_SCHEMAS)

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {op: dict(counts) for op, counts in self.counts.items()}

    def _forward(
        self, keyset: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Any:
        if is_dynamo_compiling():  # Dynamo traces what autograd calls inside a compiled function
            return _call_untraced(self._forward, keyset, x, normalized_shape, weight, eps)
        reason = self._reason_at_once(x, weight) if eps is None or 0.0 <= eps < _INF else "eps"
        if reason is not None:
            return self._decline(ATEN_FORWARD, reason, (keyset, x, normalized_shape, weight, eps))
        tensors, known_call = (x, weight, None, None), None
        if not _may_copy(x, weight):
            known_call = passes.forward_call(tensors, (tuple(normalized_shape), eps), None)
        if (known := _FORWARDS.find(known_call)) is not None:
            results = known(tensors)[:2]
            self.counts[ATEN_FORWARD][TAKEN] += 1
            return results
        found = self._implementation("rms_norm_forward", x, normalized_shape, weight)
        if isinstance(found, str):
            return self._decline(ATEN_FORWARD, found, (keyset, x, normalized_shape, weight, eps))
        function, backend = found
        of_rstd = shape_of_rstd(x, len(normalized_shape))
        eps = _DEFAULT_EPS if eps is None else eps
        spec = Spec(math.prod(normalized_shape), eps, 0.0, "once", reproducible=flags())
        call = Call(spec, backend, function)
        y, rstd, _ = _first_run(_FORWARDS, known_call, tensors, function, bind_op_forward, call, of_rstd)
        self.counts[ATEN_FORWARD][TAKEN] += 1
        return y, rstd

    def _backward(
        self,
        keyset: Any,
        dy: Tensor,
        x: Tensor,
        normalized_shape: list[int],
        rstd: Tensor,
        weight: Tensor | None,
        output_mask: list[bool],
    ) -> Any:
        given = keyset, dy, x, normalized_shape, rstd, weight, output_mask
        if is_dynamo_compiling():
            return _call_untraced(self._backward, *given)
        if (reason := self._reason_at_once(x, weight, dy, rstd)) is not None:
            return self._decline(ATEN_BACKWARD, reason, given)
        tensors, known_call = (x, dy, weight, rstd, None), None
        if not _may_copy(x, dy, weight, rstd):
            others = tuple(normalized_shape), tuple(output_mask)
            known_call = passes.backward_call(tensors, others, None)
        if (known := _BACKWARDS.find(known_call)) is not None:
            gradients = known(tensors)
            self.counts[ATEN_BACKWARD][TAKEN] += 1
            return gradients
        found = self._implementation("rms_norm_backward", x, normalized_shape, weight, dy, rstd)
        if isinstance(found, str):
            return self._decline(ATEN_BACKWARD, found, given)
        function, backend = found
        needs_dx, needs_dw = output_mask
        needs_dw = needs_dw and weight is not None
        dx = dw = None
        if needs_dx or needs_dw:
            spec = Spec(math.prod(normalized_shape), 0.0, 0.0, "once", reproducible=flags())
            call = Call(spec, backend, None, function)
            wanted = Wanted(x.dtype, None, x.dtype if needs_dw else None)
            dx, dw = _first_run(
                _BACKWARDS, known_call, tensors, function, _bind_backward, call, wanted, needs_dx
            )
        self.counts[ATEN_BACKWARD][TAKEN] += 1
        return dx, dw

    def _reason_at_once(
        self, x: Tensor, weight: Tensor | None, dy: Tensor | None = None, rstd: Tensor | None = None
    ) -> str | None:
        """Return the reason for declining a call that costs nearly nothing to find, before all else: models in another
        dtype pay for it in each call. Only a backward has dy and rstd."""
        if not self.holders:
            return "undone"
        dtype = x.dtype
        if dtype not in KERNEL_DTYPES or (weight is not None and weight.dtype is not dtype):
            return "dtype"
        if dy is not None and rstd is not None and (dy.dtype is not dtype or rstd.dtype is not _FLOAT32):
            return "dtype"
        name = get_current_backend()
        # Interpreters run by name only.
        is_declined = name == "torch" or (name == "auto" and self.device_type != "cuda")
        return "backend" if is_declined else None

    def _implementation(
        self,
        op: str,
        x: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None,
        dy: Tensor | None = None,
        rstd: Tensor | None = None,
    ) -> _Implementation | str:
        """Return the implementation for a call, or another reason for declining it."""
        given = x, weight, dy, rstd
        if _may_copy(*given) or not all([each is None or is_plain(each) for each in given]):
            return "memory"
        index, shape, size = x.get_device(), tuple(normalized_shape), x.shape
        if not shape or size[-len(shape) :] != shape:
            return "shape"
        if weight is not None and (weight.shape != shape or weight.get_device() != index):
            return "shape"
        if (dy is not None and rstd is not None) and (
            dy.shape != size
            or dy.get_device() != index
            or rstd.numel() * math.prod(shape) != x.numel()
            or rstd.get_device() != index
        ):
            return "shape"
        name, n, level = get_current_backend(), math.prod(shape), flags()
        is_aligned = are_aligned(n, x, dy)
        key = index, x.dtype, weight is None, op, name, n, is_aligned, level
        found = self._implementations.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = _implementation(op, x, weight, name, n, is_aligned, level)
            if self.device_type == "cuda":  # not on a CPU: its interpreters may be switched on and off
                if len(self._implementations) >= MOST_CHOICES:
                    self._implementations.clear()
                self._implementations[key] = found
        return found or "backend"

    def _decline(self, op: str, reason: str, given: tuple[Any, ...]) -> Any:
        """Run the call by the kernel below. given: the key set, then the arguments of the op."""
        counts = self.counts[op]
        counts[reason] = counts.get(reason, 0) + 1
        kernel = self._below[op]
        if kernel is not None:
            try:
                return kernel.call_boxed(*given)
            except RuntimeError as error:
                if "SafeKernelFunction has been invalidated" not in str(error):
                    raise
            # Getting another kernel would need this patch deregistered, in the midst of its own call.
            self._below[op] = None
            warnings.warn(
                f"the kernel of aten::{op} that override_aten() had found was deregistered. What the override declines "
                "now runs by PyTorch's single operations, which is slower. Undo the override and call override_aten() "
                "again",
                stacklevel=2,
            )
        if op == ATEN_FORWARD:
            return torch.ops.aten._fused_rms_norm.default.decompose(*given[1:])
        return _backward_by_operations(*given[1:])


def _first_run(known: Any, call: Any, tensors: Any, function: Any, bind: Any, *given: Any) -> Any:
    """Run a call that is not known, and remember it. given: the arguments of `bind` besides the tensors."""
    return run_and_remember(known, call, tensors, tensors, function, lambda _: bind(tensors, *given))


def _may_copy(*tensors: Tensor | None) -> bool:
    """Whether asking for an address may copy: a tensor is copy-on-write, or of a subclass, of which PyTorch does not
    say from 2.14 on."""
    for each in tensors:
        if each is not None and (type(each) not in PLAIN_TYPES or _is_copied_on_write(each)):
            return True
    return False


def _bind_backward(
    tensors: BackwardTensors, call: Call, wanted: Wanted, needs_dx: bool
) -> Callable[[BackwardTensors], tuple[Tensor | None, Tensor | None]]:
    run = passes.bind_backward(tensors, call, wanted)

    def run_known(tensors: BackwardTensors) -> tuple[Tensor | None, Tensor | None]:
        dx, _, dw, _ = run(tensors)
        return (dx if needs_dx else None), dw

    return run_known


def _kernel(op: str, key: str) -> Any:
    """Return the kernel that the dispatcher calls; None where there is none, as for the backward on a CPU."""
    try:
        return torch.library.get_kernel(f"aten::{op}", key)
    except RuntimeError:
        return None


def _implementation(
    op: str, x: Tensor, weight: Tensor | None, name: str, n: int, is_aligned: bool, level: int
) -> _Implementation | None:
    dtypes = x.dtype, None if weight is None else weight.dtype
    request = request_of(x.device, "once", None, *dtypes, n=n, is_aligned=is_aligned, level=level)
    for backend in KERNEL_BACKENDS:
        if name in ("auto", backend) and why_unusable(backend, request) is None:
            return _Implementation(dispatch(op, request, backend), backend)
    return None


def _backward_by_operations(
    dy: Tensor, x: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Any, output_mask: list[bool]
) -> Any:
    needs_dx, needs_dw = output_mask[0], output_mask[1] and weight is not None
    if x.numel() == 0:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        return dx, torch.zeros_like(weight) if needs_dw else None
    spec, dims = Spec(math.prod(normalized_shape), 0.0, 0.0, "once"), len(normalized_shape)
    wanted = Wanted(x.dtype, dw=weight.dtype if needs_dw else None)
    dx, _, dw, _ = reference.gradients_torch((x, dy, weight, rstd, None), spec, wanted, dims)
    return (dx if needs_dx else None), dw
