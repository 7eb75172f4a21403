# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Mark or replace aten's fused RMSNorm in graphs traced for training, by make_fx or AOTAutograd.

On a GPU `F.rms_norm` and `torch.nn.RMSNorm` are traced as `aten._fused_rms_norm`, their backwards as
`aten._fused_rms_norm_backward`: each a node with two results, which getitem nodes take. On a CPU PyTorch decomposes
both ops before a tracer sees them, and the passes find nothing.

Both passes look at a graph's own nodes, not at the graphs inside higher-order operators.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilegym_rmsnorm.backends.registry import request_of, why_unusable
from tilegym_rmsnorm.call.arithmetic import compute_dtype, default_eps
from tilegym_rmsnorm.call.options import checked_eps
from tilegym_rmsnorm.call.validation import DTYPES
from tilegym_rmsnorm.ops.norm import op
from tilegym_rmsnorm.ops.norm.spec import DW, DX
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.settings import BackendName, check_backend_name

REPLACED = "tilegym_rmsnorm_replaced"  # key of gm.meta: how many nodes `replace_rmsnorm_pass` replaced

_ATEN_FORWARD = torch.ops.aten._fused_rms_norm.default
_ATEN_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
_TENSORS = "input", "weight", "grad_out", "rstd"  # aten's argument names

_log = logging.getLogger("tilegym_rmsnorm")


def annotate_rmsnorm_for_regional_inductor_pass(
    gm: GraphModule,
    example_inputs: object = None,
    *,
    rmsnorm_compile_config: dict[str, Any] | None = None,
    one_region_each: bool = False,
) -> GraphModule:
    """Mark the fused norms of a graph, so that `torch.fx.passes.regional_inductor` compiles them.

    Sets the marks of torchtitan's pass of this name: `node.meta["custom"]["compile_with_inductor"]` of each
    `aten._fused_rms_norm` and `aten._fused_rms_norm_backward`, and of the getitem nodes that take their results. Keeps
    other keys of "custom" and all other nodes. A graph without such norms stays as it is.

    Args:
        gm: The graph, changed in place.
        example_inputs: Not used: passes are called with it.
        rmsnorm_compile_config: Inductor's settings for the norms, such as `{"max_autotune": True}`. regional_inductor
            refuses settings that Inductor does not have.
        one_region_each: Give each forward and each backward a region of its own. Otherwise norms that no other node
            separates are compiled together, by the settings of one of them. torch 2.11 and earlier ignore this.

    Returns:
        gm.

    Raises:
        TypeError: gm is not a GraphModule, or rmsnorm_compile_config not a dict. Nothing was changed.
    """
    _check_graph(gm)
    if rmsnorm_compile_config is not None and not isinstance(rmsnorm_compile_config, dict):
        got = type(rmsnorm_compile_config).__name__
        raise TypeError(f"rmsnorm_compile_config: expected a dict or None, got {got}")
    norms = _fused_norms(gm)
    mark = {} if rmsnorm_compile_config is None else {"inductor_configs": rmsnorm_compile_config}
    for number, norm in enumerate(norms):
        region = {"inductor_region": f"tilegym_rmsnorm_{number}"} if one_region_each else {}
        for node in (norm, *filter(_is_getitem, norm.users)):
            # A new dict: nodes that `torch.fx.traceback.annotate` marked may share one.
            others = node.meta.get("custom") or {}
            node.meta["custom"] = {**others, "compile_with_inductor": {**mark, **region}}
    _log.log(logging.INFO if norms else logging.DEBUG, "marked %d fused norms for Inductor", len(norms))
    return gm


def replace_rmsnorm_pass(
    gm: GraphModule, example_inputs: object = None, *, backend: BackendName | None = None
) -> GraphModule:
    """Replace a graph's fused norms, forward and backward, by the ops of this package.

    `aten._fused_rms_norm` becomes `tilegym_rmsnorm::rms_norm_forward`, `aten._fused_rms_norm_backward` becomes
    `rms_norm_backward`. The new node has the old one's metadata, and getitem nodes take the same results. The third
    result of the backward, db, is None. `gm.meta["tilegym_rmsnorm_replaced"]` says how many nodes this run replaced: 0
    where there were none.

    A node stays as it is, with the reason in the log at level DEBUG, if

    - a tensor has no `meta["val"]`, or a dtype that the ops do not take, such as a complex one;
    - its arguments do not fit;
    - anything but getitem takes the results of a backward;
    - the backend named cannot run the node here, on its dtypes and device: the log also warns.

    Each node is checked by itself: aten and the ops pass on the same rstd.

    Args:
        gm: The graph, changed in place, after all of it is checked.
        example_inputs: Not used: passes are called with it.
        backend: The backend of the new nodes. None: the one in effect when the graph runs. The level of `reproducible`
            is the one in effect now, and the one in effect when the graph runs too.

    Returns:
        gm.

    Raises:
        TypeError: gm is not a GraphModule. Nothing was changed.
        ValueError: No backend has that name. Nothing was changed.
    """
    _check_graph(gm)
    check_backend_name(backend)
    norms, calls, refused = _fused_norms(gm), {}, ""
    for norm in norms:
        given = norm.normalized_arguments(gm, normalize_to_only_use_kwargs=True)
        reason = "its arguments are not those of the op" if given is None else _obstacle(norm, given.kwargs)
        if given is not None and reason is None and (reason := _refusal(given.kwargs, backend)):
            refused = f"; {reason}"
        if given is None or reason is not None:
            _log.debug("%s stays as it is: %s", norm.name, reason)
        else:
            calls[norm] = (*_arguments(norm, given.kwargs), backend, flags())
    for norm, arguments in calls.items():
        target = op.FORWARD if norm.target is _ATEN_FORWARD else op.BACKWARD
        with gm.graph.inserting_before(norm):
            new = gm.graph.call_function(target, arguments)
        new.meta = _metadata(norm)
        norm.replace_all_uses_with(new)
        gm.graph.erase_node(norm)
    if calls:
        gm.recompile()
    gm.meta[REPLACED] = len(calls)
    level = logging.WARNING if refused else logging.INFO if norms else logging.DEBUG
    _log.log(level, "replaced %d of %d fused norms%s", len(calls), len(norms), refused)
    return gm


def _fused_norms(gm: GraphModule) -> list[Node]:
    targets = _ATEN_FORWARD, _ATEN_BACKWARD
    return [node for node in gm.graph.nodes if node.target in targets]


def _obstacle(norm: Node, given: Mapping[str, Any]) -> str | None:
    """Return why an op of ours cannot replace this node; None if it can. Sizes are not compared, which would fix the
    sizes of a graph with symbolic shapes."""
    tensors: dict[str, Tensor] = {}
    for name in _TENSORS:
        if (node := given.get(name)) is None:
            continue
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor):
            return f'{name} has no meta["val"]'
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_nested:
            return f"{name} has dtype {value.dtype} and layout {value.layout}"
        tensors[name] = value
    x, shape = tensors.get("input"), given["normalized_shape"]
    if x is None or not isinstance(shape, (list, tuple)) or not 0 < len(shape) <= x.ndim:
        return f"normalized_shape is {shape}"
    if 0 in shape:
        return "its rows have no elements"
    if norm.target is _ATEN_BACKWARD:
        return _obstacle_of_backward(norm, given)
    try:
        checked_eps(given["eps"])
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _refusal(given: Mapping[str, Any], backend: str | None) -> str | None:
    """Return why the backend named cannot run this node; None if it can. On device meta no backend is asked."""
    x = given["input"].meta["val"]
    if backend is None or backend == "auto" or x.is_meta:
        return None
    weight, dy = (node and node.meta["val"].dtype for node in map(given.get, ("weight", "grad_out")))
    shape = given["normalized_shape"]
    n = math.prod(shape) if all(type(size) is int for size in shape) else None  # others are symbols
    # A graph does not say where memory begins.
    request = request_of(x.device, "once", None, x.dtype, weight, dy, n=n, is_aligned=True, level=flags())
    unusable = why_unusable(backend, request)
    return unusable and f"backend {backend!r} cannot run it: {unusable.reason}"


def _obstacle_of_backward(norm: Node, given: Mapping[str, Any]) -> str | None:
    mask = given["output_mask"]
    if not isinstance(mask, (list, tuple)) or [type(each) for each in mask] != [bool, bool]:
        return f"output_mask is {mask}"
    if given["grad_out"] is None or given["rstd"] is None:
        return "it has no grad_out or no rstd"
    x, rstd = given["input"].meta["val"], given["rstd"].meta["val"]
    if rstd.dtype != compute_dtype(x.dtype) or rstd.ndim != x.ndim:
        return f"rstd has dtype {rstd.dtype} and {rstd.ndim} dimensions"
    if not all(_is_getitem(user) and user.args[1] in (0, 1) for user in norm.users):
        return "its results are not taken by getitem"
    return None


def _arguments(norm: Node, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of our op, without the backend and the level."""
    x, weight, dims = given["input"], given["weight"], len(given["normalized_shape"])
    if norm.target is _ATEN_FORWARD:
        eps = checked_eps(given["eps"])
        eps = default_eps(x.meta["val"].dtype) if eps is None else eps
        return x, None, weight, None, dims, eps, 0.0, "once", 1.0, None, None
    needs_dx, needs_dw = given["output_mask"]
    wanted = DX * needs_dx + DW * needs_dw
    of_rows = given["grad_out"], x, weight, given["rstd"], None
    return *of_rows, wanted, dims, 0.0, "once", 1.0, None, None, None, None


def _metadata(norm: Node) -> dict[str, Any]:
    meta = dict(norm.meta)
    more = [None] if norm.target is _ATEN_FORWARD else [None, None]
    for key in ("val", "tensor_meta"):  # one entry for each result
        if isinstance(meta.get(key), (tuple, list)):
            meta[key] = (*meta[key], *more)
    return meta


def _is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def _check_graph(gm: object) -> None:
    if not isinstance(gm, GraphModule):
        raise TypeError(f"gm: expected a torch.fx.GraphModule, got {type(gm).__name__}")
