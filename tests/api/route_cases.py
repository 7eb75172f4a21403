# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Three axes of routes.py: forms of a call, kinds of tensors, and backends. Private names of the package stand in
`backend_of` alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import by_address
import pytest
import torch
import torch.nn.functional as F
from gate_cases import Named, freed_view
from helpers import BF16, FP32, FP64
from processes import mesh_of_one
from torch import Tensor

import tilegym_rmsnorm as tr
from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.routes import known_calls

N, EPS = 16, 1e-6
Tensors = dict[str, Any]
ROWS = ("x", "residual", "dy", "d_residual_out")  # arrays of rows, which some kinds are of alone


class Form(NamedTuple):
    """A call. tensors: shape and dtype by name. learn: names of those that require grad. used: the results that a loss
    depends on. run(tensors, backend) gives results by name. like: F.rms_norm of the same arguments, if there is one."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    run: Callable[[Tensors, str | None], dict[str, Any]]
    learn: tuple[str, ...] = ("x", "residual", "weight", "bias")
    used: tuple[str, ...] = ("y", "residual_out")
    like: Callable[[Tensors], Tensor] | None = None


def _norm(
    dtype: torch.dtype = FP32,
    *,
    lead: tuple[int, ...] = (6,),
    shape: tuple[int, ...] = (N,),
    weight: tuple[int, ...] | None = (N,),
    weight_dtype: torch.dtype | None = None,
    bias: bool = False,
    residual: torch.dtype | None = None,
    learn: tuple[str, ...] = Form._field_defaults["learn"],
    used: tuple[str, ...] = Form._field_defaults["used"],
    eps: Callable[[Tensor], Any] = lambda x: EPS,
    **options: Any,
) -> Form:
    """`rms_norm`."""
    tensors = {"x": ((*lead, *shape), dtype)}
    if residual is not None:
        tensors["residual"] = tensors["x"][0], residual
    if weight is not None:
        tensors["weight"] = weight, weight_dtype or dtype
    if bias:
        tensors["bias"] = weight or shape, weight_dtype or dtype
    names = ("y", "residual_out") if residual is not None else ("y",)

    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = {"bias": t["bias"]} if bias else {}
        given |= {"residual": t["residual"]} if residual is not None else {}
        row = t.get("row", shape)
        y = tr.rms_norm(t["x"], row, t.get("weight"), eps(t["x"]), **given, **options, backend=backend)
        return dict(zip(names, (y,) if residual is None else y, strict=True))

    is_like = len(tensors) == 1 + (weight is not None) and weight in (None, shape) and not options
    like = (lambda t: F.rms_norm(t["x"], shape, t.get("weight"), EPS)) if is_like else None
    return Form(tensors, run, learn, used, like)


def _module(residual: bool = False, **options: Any) -> Form:
    """`RMSNorm`."""
    tensors = {"x": ((6, N), FP32), "weight": ((N,), FP32)}
    if residual:
        tensors["residual"] = (6, N), FP32
    if "bias" in options:
        tensors["bias"] = (N,), FP32
    names = ("y", "residual_out") if residual else ("y",)

    norms = {
        name: tr.RMSNorm(N, EPS, backend=name, **options) for name in (None, *settings.AUTO_ORDER, "auto")
    }

    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = (t["x"], t["residual"]) if residual else (t["x"],)
        parameters = {name: t[name] for name in ("weight", "bias") if name in tensors}
        y = torch.func.functional_call(norms[backend], parameters, given)
        return dict(zip(names, y if residual else (y,), strict=True))

    return Form(tensors, run)


def _forward(dtype: torch.dtype = FP32, **options: Any) -> Form:
    """`rms_norm_forward`, which nothing differentiates: its tensors require grad all the same."""
    tensors = {"x": ((2, 3, N), dtype), "weight": ((N,), dtype)}
    if "residual_alpha" in options:
        tensors |= {"residual": ((2, 3, N), dtype), "bias": ((N,), dtype)}
    names = ("y", "residual_out", "rstd") if "residual" in tensors else ("y", "rstd")

    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = {name: t[name] for name in ("residual", "bias") if name in tensors}
        got = tr.rms_norm_forward(t["x"], t["weight"], EPS, **given, **options, backend=backend)
        return dict(zip(names, got, strict=True))

    return Form(tensors, run)


def _backward(
    function: Callable[..., Any] = tr.rms_norm_backward, more: bool = False, **options: Any
) -> Form:
    """`rms_norm_backward`, or its differentiable twin."""
    rows = (2, 3, N), FP32
    tensors = {"x": rows, "dy": rows, "weight": ((N,), FP32), "rstd": ((6,), FP32)}
    if more:
        tensors["d_residual_out"] = rows
    names = ("dx", "dw", "db") if options.get("needs_db") else ("dx", "dw")

    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = {"d_residual_out": t["d_residual_out"]} if more else {}
        named = {} if function is tr.rms_norm_backward_torch else {"backend": backend}
        got = function(t["x"], t["dy"], t["weight"], t["rstd"], **given, **options, **named)
        return dict(zip(names, got, strict=True))

    return Form(tensors, run, ("x", "dy", "weight"), names)


def _op_forward() -> Form:
    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = t["x"], None, t["weight"], None, 1, EPS, 0.0, "once", 1.0, None, None, backend
        y, rstd, _ = torch.ops.tilegym_rmsnorm.rms_norm_forward(*given)
        return {"y": y, "rstd": rstd}

    return Form({"x": ((6, N), FP32), "weight": ((N,), FP32)}, run)


def _op_add_forward() -> Form:
    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = t["x"], t["residual"], t["weight"], t["bias"], 1, EPS, 0.0, "once", 0.5, None, None, backend
        y, rstd, residual_out = torch.ops.tilegym_rmsnorm.rms_norm_forward(*given)
        return {"y": y, "residual_out": residual_out, "rstd": rstd}

    rows, vector = ((6, N), FP32), ((N,), FP32)
    return Form({"x": rows, "residual": rows, "weight": vector, "bias": vector}, run)


def _op_backward(wanted: int) -> Form:
    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = t["dy"], t["x"], t["weight"], t["rstd"], None, wanted, 1, 0.0, "once", 1.0
        dx, dw, db, _ = torch.ops.tilegym_rmsnorm.rms_norm_backward(*given, None, None, None, None, backend)
        found = {"dx": dx if wanted & 1 else None, "dw": dw, "db": db}
        return {name: each for name, each in found.items() if each is not None}  # transforms allow no None

    rows = (6, N), FP32
    tensors = {"x": rows, "dy": rows, "weight": ((N,), FP32), "rstd": ((6, 1), FP32)}
    return Form(tensors, run, ("x", "dy", "weight"), ("dx", "dw", "db"))


def _op_add_backward(wanted: int) -> Form:
    names = "dx", "d_residual", "dw", "db"

    def run(t: Tensors, backend: str | None) -> dict[str, Any]:
        given = t["dy"], t["x"], t["weight"], t["rstd"], t["d_residual_out"], wanted, 1, 0.0, "once", 0.5
        got = torch.ops.tilegym_rmsnorm.rms_norm_backward(*given, None, None, None, None, backend)
        dx, dw, db, d_residual = got
        return {"dx": dx, "d_residual": d_residual, "dw": dw, "db": db}

    rows = (6, N), FP32
    tensors = {"x": rows, "dy": rows, "d_residual_out": rows, "weight": ((N,), FP32), "rstd": ((6, 1), FP32)}
    return Form(tensors, run, ("x", "dy", "weight"), names)


_GEMMA: dict[str, Any] = {"offset": 1.0, "casting": "llama"}
FORMS = {
    "plain": _norm(),
    "no weight": _norm(weight=None),
    "three dimensions": _norm(lead=(2, 3)),
    "bias": _norm(bias=True),
    "offset, llama": _norm(BF16, **_GEMMA),
    "residual": _norm(residual=FP32),
    "residual of another dtype, alpha": _norm(
        BF16, residual=FP32, residual_alpha=0.5, residual_dtype=BF16, bias=True, **_GEMMA
    ),
    "out_dtype": _norm(BF16, out_dtype=FP32),
    "heads": _norm(lead=(2, 3), weight=(3, N)),
    "heads, bias, residual": _norm(lead=(2, 3), weight=(3, N), bias=True, residual=FP32),
    "two dimensions": _norm(shape=(3, N), weight=(3, N)),
    "float64": _norm(FP64),
    "mixed dtypes": _norm(BF16, weight_dtype=FP32, bias=True),
    "only weight learns": _norm(learn=("weight",)),
    "only bias learns": _norm(bias=True, learn=("bias",)),
    "only bias learns, residual": _norm(bias=True, residual=FP32, learn=("bias",)),
    "only residual learns, alpha": _norm(residual=FP32, learn=("residual",), residual_alpha=0.5),
    "only x learns, residual": _norm(residual=FP32, learn=("x",)),
    "only weight learns, residual": _norm(residual=FP32, learn=("weight",)),
    "only residual_out used": _norm(residual=FP32, used=("residual_out",), residual_alpha=0.5),
    "only y used, residual": _norm(residual=FP32, used=("y",)),
    "eps of a size": _norm(eps=lambda x: x.shape[0] * EPS),
    "RMSNorm": _module(),
    "RMSNorm, bias, residual, alpha": _module(bias=True, residual=True, residual_alpha=0.5),
    "rms_norm_forward": _forward(),
    "rms_norm_forward, residual, bias": _forward(residual_alpha=0.5),
    "rms_norm_backward": _backward(),
    "rms_norm_backward, d_residual_out, db": _backward(more=True, needs_db=True),
    "rms_norm_backward_torch": _backward(tr.rms_norm_backward_torch),
    "op forward": _op_forward(),
    "op add forward": _op_add_forward(),
    "op backward": _op_backward(3),
    "op backward, db alone": _op_backward(4),
    "op add backward": _op_add_backward(15),
}


def loss_of(gradients: Any) -> Tensor:
    """A number of which second gradients are taken."""
    return sum(each.abs().sin().sum() for each in gradients)


class Kind(NamedTuple):
    """A kind of tensors. base: from a plain tensor of the form to a plain one with the values of the case. make: from
    that to the case's. values: back. names: the tensors that `make` is for; None: all. mesh: of processes, which it
    needs. row: the shape of a row, where it is another than the form's."""

    make: Callable[[Tensor], Any] = lambda t: t
    values: Callable[[Any], Tensor] = lambda t: t
    base: Callable[[str, Tensor], Tensor] = lambda name, t: t
    names: tuple[str, ...] | None = None
    mesh: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    row: tuple[int, ...] | None = None


MESHES: list[Any] = []  # the one of the cell, the last


@contextlib.contextmanager
def _mesh_of_eight() -> Iterator[Any]:
    """Yield a mesh of this process and seven absent ones: collectives give no values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield init_device_mesh("cpu", (8,))
    finally:
        dist.destroy_process_group()


def _dtensor(placement: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def make(tensor: Tensor) -> Any:
        from torch.distributed.tensor import Replicate, distribute_tensor

        return distribute_tensor(tensor, MESHES[-1], [placement(tensor) if tensor.ndim > 1 else Replicate()])

    return make


def _shard(dim: int) -> Callable[[Tensor], Any]:
    def placement(tensor: Tensor) -> Any:
        from torch.distributed.tensor import Shard

        return Shard(dim % tensor.ndim)

    return placement


def _two(tensor: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(tensor.clone(), tensor.clone())


def _fake(tensor: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not FAKE_MODES:
        FAKE_MODES.append(FakeTensorMode())
    return FAKE_MODES[-1].from_tensor(tensor)


FAKE_MODES: list[Any] = []  # of the fake tensors of one cell


def _unwrapped(tensor: Tensor) -> Tensor:
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def _dead(tensor: Tensor) -> Tensor:
    """Wrap a tensor in a torch.func transform that has ended."""
    kept = []
    torch.func.grad(lambda t: kept.append(t) or t.sum())(tensor)
    return kept[-1]


def _waiting(tensor: Tensor) -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor.clone())


_OFFSETS = torch.tensor([0, 2, 6])  # one object: by it PyTorch knows that two have rows of the same lengths


def _jagged(tensor: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(tensor.clone(), _OFFSETS)


def _in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _complex(name: str, tensor: Tensor) -> Tensor:
    return torch.complex(tensor, tensor.flip(0))


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def _spread(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor * torch.nan], dim=-1)[..., 0]


_MATRIX = ("x", "residual")
MORE_SHARDS = "DTensor, more shards than rows"
KINDS = {
    "tensors": Kind(),
    "parameters": Kind(torch.nn.Parameter, names=("weight", "bias")),
    "a subclass without operations": Kind(lambda t: t.as_subclass(Named), lambda t: t.as_subclass(Tensor)),
    "columns first": Kind(_transposed),
    "every second column": Kind(_spread),
    "DTensor, rows sharded": Kind(_dtensor(_shard(0)), lambda t: t.full_tensor(), mesh=mesh_of_one),
    "DTensor, columns sharded": Kind(_dtensor(_shard(-1)), lambda t: t.full_tensor(), mesh=mesh_of_one),
    "DTensor beside a plain weight": Kind(
        _dtensor(_shard(0)), lambda t: getattr(t, "full_tensor", lambda: t)(), names=ROWS, mesh=mesh_of_one
    ),
    MORE_SHARDS: Kind(_dtensor(_shard(0)), lambda t: t.to_local().to("meta"), mesh=_mesh_of_eight),
    "TwoTensor": Kind(_two, lambda t: getattr(t, "a", t)),
    "weight a TwoTensor": Kind(_two, lambda t: getattr(t, "a", t), names=("weight",)),
    "dy a TwoTensor": Kind(_two, lambda t: getattr(t, "a", t), names=("dy", "d_residual_out")),
    "dy columns first": Kind(_transposed, names=("dy", "d_residual_out")),
    "fake": Kind(_fake),
    "functional": Kind(torch._to_functional_tensor, _unwrapped),
    "left over from torch.func": Kind(_dead),
    "still communicated": Kind(_waiting, lambda t: t.wait() if hasattr(t, "wait") else t),
    "zeros without memory": Kind(
        lambda t: torch._efficientzerotensor(t.shape),
        base=lambda name, t: t * (name not in _MATRIX),
        names=_MATRIX,
    ),
    "a pending minus sign": Kind(lambda t: torch._neg_view(-t), lambda t: t.resolve_neg()),
    "freed memory": Kind(freed_view, names=_MATRIX),
    "meta": Kind(lambda t: t.to("meta")),
    "of inference mode": Kind(_in_inference_mode, names=_MATRIX),
    "nested, jagged": Kind(_jagged, lambda t: t.values() if t.is_nested else t, names=ROWS),
    "complex": Kind(base=_complex),
    "no rows": Kind(base=lambda name, t: t[:0] if t.ndim > 1 else t),
    "rows of no elements": Kind(base=lambda name, t: t[..., :0], row=(0,)),
    "sparse": Kind(lambda t: t.to_sparse(), lambda t: t.to_dense(), names=("x",)),
    "integers": Kind(base=lambda name, t: t.to(torch.int32) if name == "x" else t),
    "weight of another shape": Kind(base=lambda name, t: t[..., :3] if name == "weight" else t),
}


class Backend(NamedTuple):
    """name: what `backend=` says. has_kernel: the stand-in for a kernel is there, as "cutile" and first of "auto".
    around: a block that says more. interprets: TILEGYM_RMSNORM_INTERPRET is on."""

    name: str | None
    has_kernel: bool = False
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    interprets: bool = False


@contextlib.contextmanager
def _reference_of_the_process() -> Iterator[None]:
    tr.set_backend("torch")
    try:
        yield
    finally:
        tr.set_backend(None)


BACKENDS = {
    "torch": Backend("torch"),
    "none usable": Backend(None),
    "auto": Backend(None, has_kernel=True),
    "auto by name": Backend("auto", has_kernel=True),
    "kernel": Backend("cutile", has_kernel=True),
    "kernel by use_backend": Backend(None, has_kernel=True, around=lambda: tr.use_backend("cutile")),
    "torch by set_backend": Backend(None, has_kernel=True, around=_reference_of_the_process),
    "interpreter": Backend("cutile", interprets=True),
    "no GPU": Backend("cutile"),
}
EVENTS: list[str] = []  # implementations that ran: "reference" or "kernel"


@contextlib.contextmanager
def backend_of(title: str) -> Iterator[str | None]:
    """Yield the value of `backend=`. Inside the block each implementation that runs is noted in EVENTS, and nothing is
    known of earlier calls."""
    backend = BACKENDS[title]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(settings.BACKEND_VARIABLE, raising=False)
        patch.setenv("TILEGYM_RMSNORM_INTERPRET", "1" if backend.interprets else "0")
        with contextlib.suppress(ImportError):  # without cuda-tile there is no interpreter, but the stand-in
            registry._implemented_ops("cutile")
        if backend.has_kernel:
            by_address.use(patch)
        registry._implemented_ops("torch")
        implementations = dict(registry._impls)
        for op in registry.OPS:
            reference = implementations[op, "torch"]
            implementations[op, "torch"] = _noted("reference", reference)
            if backend.has_kernel:
                implementations[op, "cutile"] = _kernel_of(reference)
            if (op, "cutile") in implementations:
                implementations[op, "cutile"] = _noted("kernel", implementations[op, "cutile"])
        patch.setattr(registry, "_impls", implementations)
        patch.setattr(registry, "_chosen", {})
        patch.setattr(registry, "_told", set())
        known_calls.forget()
        with backend.around():
            yield backend.name
    known_calls.forget()


def _noted(word: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            EVENTS.append(word)
        return run(*arguments)

    return noted


def _kernel_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a kernel: it refuses what a kernel could not read, and has the bits of the reference."""

    def kernel(spec: Any, tensors: Any, *wanted: Any) -> Any:
        assert torch._C._len_torch_dispatch_stack() == 0, "launched where a mode sees its tensors"
        for tensor in tensors:
            if tensor is not None:
                is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
                assert is_plain, f"launched on a {type(tensor).__name__}"
                assert tensor.data_ptr() != 0, "launched on address 0"
        return reference(spec, tensors, *wanted)

    return kernel
