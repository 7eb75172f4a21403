# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Other libraries' RMSNorm, called below their autograd functions, as those call it, rstd and dw included.

All get the same tensors: x, dy and weight of one dtype, weights used once in float32 and nothing rounded in between
(Liger's casting mode "gemma" with offset 0). Where a library has several ways to compute it, each is one of its
settings, and the fastest counts, for every op and shape by itself. pyproject.toml's extra `peers` pins the versions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.measure.shapes import Shape
from bench.providers.ours import COMPILED_MODES, EPS, PROVIDERS, Provider, compiled_providers, make_provider
from bench.providers.quack_configs import quack_grids, quack_neighbours

# Libraries that must be measured in a process of their own, with the reason.
ALONE = {"tilegym": "import tilegym replaces ct.launch by a function without keyword arguments"}
GEMMA = 1  # Liger's number of that casting mode, in all of its implementations


def make_providers(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """The provider of that name for one shape and dtype; of a library, and torch.compile, one for each setting."""
    if name in LIBRARIES:
        return LIBRARIES[name].make(shape, dtype, device)
    if name in COMPILED_MODES:
        return compiled_providers(name, shape, dtype, device)
    return [make_provider(name, shape, dtype, device)]


def why_missing(name: str) -> str | None:
    """Why a library cannot be measured in this environment; None where it can, or the name is none of a library."""
    if name not in LIBRARIES:
        return None
    library = LIBRARIES[name]
    if missing := [module for module in library.modules if not _is_installed(module)]:
        return f"no module {', '.join(missing)}. To mend it: pip install '.[peers]' in a checkout"
    return library.why_not()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that should hold it
        return False


def _quack(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """Its own choice of a config, as `quack.rmsnorm` makes it, and that choice's neighbours in its search space.

    Its backward takes the grid from the partial rows of dw, whose number is its heuristic's, whatever the cluster and
    however few the rows of x: of 9000 columns 66 clusters, with one block each where cluster_n is 1, of one row of 64
    columns 2112 blocks, whose partial rows are all summed. So other numbers are timed too, see quack_grids.
    """
    quack = importlib.import_module("quack.rmsnorm")  # `quack.rmsnorm` as an attribute is the function
    configs = importlib.import_module("quack.rmsnorm_config")
    cols, bits = shape[1], dtype.itemsize * 8

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, _, rstd = quack.rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
        return y, rstd

    def backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return quack.rmsnorm_bwd(x, weight, dy, rstd)[:2]

    def forward_by(config: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
        quack.rmsnorm_fwd_tuned.fn(x, weight, y, rstd=rstd, eps=EPS, config=config)
        return y, rstd

    def backward_by(
        config: Any, partial_rows: int, x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        dx = torch.empty_like(x)
        partial = x.new_empty((partial_rows, cols), dtype=torch.float32)
        quack.rmsnorm_bwd_tuned.fn(x, weight, dy, rstd, dx, partial, has_dw_partial=True, config=config)
        return dx, partial.sum(dim=0).to(weight.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return quack.rmsnorm(x, weight, eps=EPS)

    providers = [Provider("quack", forward, backward, norm, settings="its heuristic")]
    chosen = configs.RmsNormFwdConfig.from_analytical_heuristic(cols, bits)
    for text, config in quack_neighbours(chosen, cols, dtype.itemsize):
        call = functools.partial(forward_by, config)
        providers.append(Provider("quack", call, None, None, settings=f"forward {text}"))
    chosen = configs.RmsNormBwdConfig.from_analytical_heuristic(cols, bits, bits)
    usual = configs.get_sm_count(cols, device)
    for text, config in quack_neighbours(chosen, cols, dtype.itemsize):
        call = functools.partial(backward_by, config, usual)
        providers.append(Provider("quack", None, call, None, settings=f"backward {text}"))
    sm_count = configs.get_sm_count(8192, device)  # one partial row an SM, of Hopper
    for text, config, partial_rows in quack_grids(chosen, cols, dtype.itemsize, usual, sm_count, shape[0]):
        call = functools.partial(backward_by, config, partial_rows)
        providers.append(Provider("quack", None, call, None, settings=f"backward {text}"))
    return providers


def _liger_triton(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """Run in place, its default: else it fills dx with zeros first. row_mode matters for many narrow rows only."""
    liger = importlib.import_module("liger_kernel.ops.rms_norm")
    block, warps = liger.calculate_settings(shape[1])

    def make(row_mode: bool | None) -> Provider:
        def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            y, _, rstd, *_ = liger.rms_norm_forward(x, weight, EPS, 0.0, GEMMA, row_mode)
            return y, rstd

        def backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
            arguments = (dy, x, weight, rstd, 0.0, GEMMA, block, warps, True, row_mode)
            return liger.rms_norm_backward(*arguments)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return liger.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", True, row_mode)

        settings = f"row_mode={row_mode}"
        return Provider("liger.triton", forward, backward, norm, settings=settings, overwrites_dy=True)

    return [make(None), make(True)] if block <= 256 and shape[0] >= 4096 * 8 else [make(None)]


def _liger_cutile(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """Both of its cuTile implementations, not in place: cuTile leaves open what a kernel does whose arrays overlap."""
    tiles = importlib.import_module("liger_kernel.ops.cutile.ops.rms_norm")
    registered = importlib.import_module("liger_kernel.ops.backends._cutile.rms_norm")
    block = 1 << (shape[1] - 1).bit_length()

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, _, rstd, *_ = tiles.rms_norm_forward(x, weight, EPS, 0.0, GEMMA, None)
        return y, rstd

    def backward_by(
        policy: str, x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        tiles._DW_REDUCTION_POLICY = policy  # of the environment variable LIGER_RMS_DW_REDUCTION
        return tiles.rms_norm_backward(dy, x, weight, rstd, 0.0, GEMMA, block, None, False, None)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return tiles.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False, None)

    def registered_forward(mode: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, _, rstd, *_ = registered._rms_norm_forward(x, weight, EPS, 0.0, GEMMA, mode)
        return y, rstd

    def registered_backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return registered._rms_norm_backward(dy, x, weight, rstd, 0.0, GEMMA, block, False)

    make = functools.partial(Provider, "liger.cutile", norm=None)
    auto, by_torch = (functools.partial(backward_by, policy) for policy in ("auto", "torch"))
    providers = [dataclasses.replace(make(forward, auto, settings="ops.cutile"), norm=norm)]
    providers.append(make(None, by_torch, settings="ops.cutile, dw by torch"))
    for mode in ("standard", "static_persistent", "multi_wave_cached"):
        call = functools.partial(registered_forward, mode)
        providers.append(make(call, None, settings=f"nvidia-cutile {mode}"))
    providers.append(make(None, registered_backward, settings="nvidia-cutile"))
    return providers


def _liger_cute(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    liger = importlib.import_module("liger_kernel.ops.backends._cutedsl.rms_norm")
    vector = 16 // dtype.itemsize
    if shape[1] % vector:
        raise ValueError(f"Liger takes its Triton kernels for rows of {shape[1]}, no multiple of {vector}")

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, _, _, rstd = liger._rms_norm_cutedsl_forward(x, weight, EPS, 0.0, GEMMA)
        return y, rstd

    def backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = liger._rms_norm_cutedsl_backward(dy, x, weight, rstd, False, GEMMA)
        return dx, dw.to(weight.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return liger._LigerRMSNormCuTeDSLFunction.apply(x, weight, EPS, 0.0, "gemma", False, None)

    return [Provider("liger.cute", forward, backward, norm)]


def _tilegym(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """Offer the mode that it chooses, and each of its three forward kernels."""
    tilegym = importlib.import_module("tilegym.ops.cutile.rms_norm")

    def forward_by(mode: str | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        context = _Context()
        y = tilegym._RMSNorm.forward(context, x, None, weight, EPS, None, mode)
        return y, context.saved_tensors[2]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return tilegym.rms_norm(x, None, weight, EPS)

    first = functools.partial(forward_by, None)
    providers = [Provider("tilegym", first, tilegym.rms_norm_backward, norm, settings="its choice")]
    for mode in ("static_persistent", "multi_wave_reload", "multi_wave_cached"):
        call = functools.partial(forward_by, mode)
        providers.append(Provider("tilegym", call, None, None, settings=f"forward {mode}"))
    return providers


class _Context:
    """Context of an autograd.Function's forward: x, weight and rstd are among its saved tensors."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _torch_quack(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Provider]:
    """The functions by which PyTorch's overrides of aten::_fused_rms_norm and its backward call its copy of quack."""
    native = importlib.import_module("torch._native.ops.norm.norms")
    normalized = [shape[1]]

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return native.quack_rmsnorm_fwd(x, weight, normalized, EPS)

    def backward(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return native.quack_rmsnorm_bwd(dy, x, rstd, weight, normalized)

    return [Provider("torch.quack", forward, backward, None, rstd_is_column=True)]


def _no_reason() -> None:
    return None


def _why_no_torch_quack() -> str | None:
    """Check as PyTorch does before it overrides F.rms_norm."""
    try:
        utils = importlib.import_module("torch._native.cutedsl_utils")
    except ImportError:
        return f"torch {torch.__version__} has no overrides of F.rms_norm; 2.13 has"
    if not utils.runtime_available():
        return f"torch {torch.__version__} is no CUDA build, or finds no nvidia-cutlass-dsl or apache-tvm-ffi"
    if not utils._version_is_ok():
        known = ", ".join(sorted(map(str, utils._CUTEDSL_REQUIRED_VERSIONS)))
        return f"torch {torch.__version__} takes nvidia-cutlass-dsl {known}, found {utils.runtime_version()}"
    return None


@dataclasses.dataclass(frozen=True)
class Library:
    """Maker of a library's providers, modules that must be importable, and what else may keep it from running."""

    make: Callable[[Shape, torch.dtype, torch.device], list[Provider]]
    modules: tuple[str, ...]
    why_not: Callable[[], str | None] = _no_reason


LIBRARIES = {
    "quack": Library(_quack, ("quack", "cutlass", "tvm_ffi")),
    "liger.cutile": Library(_liger_cutile, ("liger_kernel", "cuda.tile")),
    "liger.cute": Library(_liger_cute, ("liger_kernel", "cutlass", "tvm_ffi")),
    "liger.triton": Library(_liger_triton, ("liger_kernel", "triton")),
    "tilegym": Library(_tilegym, ("tilegym", "cuda.tile")),
    "torch.quack": Library(_torch_quack, (), _why_no_torch_quack),
}
ALL_PROVIDERS = (*PROVIDERS, *LIBRARIES)
