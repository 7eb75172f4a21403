# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of every op, for laws that hold for all of them. A new op has an entry in OPS, and a function that makes calls.

@of_each_op()
def test_a_law(op, kind):
    call = op.make(kind, seed=1)
    outputs = call.public(*call.leaves.values(), backend="torch")
"""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import helpers
import pytest
import rope_cases
import torch
import torch.nn.functional as F
import variants
from helpers import BF16, DEVICE, FP32, FP64
from planning import rope_problem
from rope_cases import RopeCase
from torch import Tensor
from variants import VARIANTS, Variant

from tilegym_rmsnorm import qk_norm_rope, rms_norm, rms_norm_rope, rope
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.plans.rope import RopePlan, RopeTiles
from tilegym_rmsnorm.ops.norm import checks as norm_checks
from tilegym_rmsnorm.ops.norm import eager as norm_eager
from tilegym_rmsnorm.ops.norm import op as norm_op
from tilegym_rmsnorm.ops.rope import op as rope_op
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPTIONS
from tilegym_rmsnorm.routes import known_calls
from tilegym_rmsnorm.settings import AUTO_ORDER

Outputs = tuple[Tensor, ...]


class Call(NamedTuple):
    """A call of an op. Its functions take other tensors in the place of its leaves, and of those that are fixed where
    these are given too. They return the differentiable results."""

    leaves: dict[str, Tensor]  # the tensors that may need gradients, by the names of the public function
    fixed: dict[str, Tensor]  # the others
    dys: Outputs
    public: Callable[..., Outputs]  # options by name: backend, and others that differ
    by_op: Callable[..., Outputs]  # by the library op; its backend by name
    exact: Callable[..., Outputs]  # the formula, which rounds nothing; differentiable
    of_forward: Callable[..., tuple[Any, ...]]  # the op's arguments: takes tensors, and a backend by name
    of_backward: Callable[..., tuple[Any, ...]]  # of the backward's op: takes `wanted` and a backend

    @property
    def tensors(self) -> Outputs:
        return *self.leaves.values(), *self.fixed.values()

    def recorded(self) -> list[Tensor]:
        return [each.detach().requires_grad_() for each in self.leaves.values()]

    def both_passes(self, function: Callable[..., Outputs] | None = None, **options: Any) -> Outputs:
        """Return the results, and the gradients of all leaves. function: None for the public one."""
        leaves = self.recorded()
        results = (function or self.public)(*leaves, *self.fixed.values(), **options)
        return *(each.detach() for each in results), *torch.autograd.grad(results, leaves, self.dys)


class Op(NamedTuple):
    function: Callable[..., Any]
    forward: Any  # the library ops
    backward: Any
    make: Callable[..., Call]  # takes a kind, and by name seed and device
    kinds: Mapping[str, Any]  # calls that kernels take
    usual: tuple[str, ...]  # names of kinds that differ in what a caller sees of them, for laws about calls
    few: tuple[str, ...]  # of kinds, for laws that take long
    smooth: Mapping[str, Any]  # small calls in float64, for numerical derivatives
    alike: Any  # a kind of which each tensor may be another one's, too
    # a kind, and of each option values by which its results differ
    options: tuple[Any, Mapping[str, tuple[Any, ...]]]
    placed: Mapping[str, Any]  # small calls, whose rows may be sharded in all dimensions but the last
    longer: Callable[[Any], Any]  # a kind with more rows
    empty: Callable[[Any], Sequence[Any]]  # kinds without rows
    wanted: Callable[[Any], Sequence[int]]  # of a kind, what the backward's op may be asked for
    unknown: tuple[tuple[Any, str], ...]  # functions that no known call runs, by owner and name
    # of a kind, the options that a call has under autocast of DEVICE, and the dtype of leaves, or None
    autocast: Callable[[Any], tuple[dict[str, Any], torch.dtype | None]] = lambda kind: ({}, None)
    # of the settings of one of its kernels, an architecture and a casting, a plan; None of other settings
    plan_of: Callable[[Any, int, str], Any] = lambda *_: None

    @property
    def name(self) -> str:
        return self.function.__name__


def of_norm(variant: Variant, *, seed: int = 0, device: Any = DEVICE) -> Call:
    inputs, shape = variants.make(variant, seed=seed, device=device), (variant.n,)
    if variant.dims == 2:
        shape = math.gcd(variant.n, 8), variant.n // math.gcd(variant.n, 8)
        inputs = variants.VariantInputs(*(t if t is None else t.unflatten(-1, shape) for t in inputs))
    x, weight, bias, residual, dy, d_residual_out = inputs
    named = {"input": x, "weight": weight, "bias": bias, "residual": residual}
    leaves = {name: each for name, each in named.items() if each is not None}
    offset, casting, alpha = variant.offset, variant.casting, variant.alpha
    dims, last = variant.dims, tuple(range(-variant.dims, 0))

    def tensors(*given: Tensor) -> variants.VariantInputs:
        x, *others = (dict.fromkeys(named) | dict(zip(leaves, given, strict=True))).values()
        return variants.VariantInputs(x, *others, dy, d_residual_out)

    def public(*given: Tensor, **changes: Any) -> Outputs:
        made = tensors(*given)
        options = {"eps": variant.eps} | variants.options(variant, made) | changes
        results = rms_norm(made.x, shape, made.weight, **options)
        return results if isinstance(results, tuple) else (results,)

    def of_forward(*given: Tensor, backend: str | None = None) -> tuple[Any, ...]:
        made = tensors(*given)
        numbers = dims, variant.eps, offset, casting, alpha, variant.residual_out_dtype, variant.out_dtype
        return made.x, made.residual, made.weight, made.bias, *numbers, backend

    def by_op(*given: Tensor, backend: str | None = None) -> Outputs:
        y, _, residual_out = norm_op.FORWARD(*of_forward(*given, backend=backend))
        return (y,) if residual_out is None else (y, residual_out)

    def exact(*given: Tensor) -> Outputs:
        made = tensors(*given)
        total = made.x if residual is None else alpha * made.x + made.residual
        y = total * torch.rsqrt(total.square().mean(last, keepdim=True) + variant.eps)
        y = y if weight is None else y * (made.weight + offset)
        y = y if bias is None else y + made.bias
        return (y,) if residual is None else (y, total)

    def of_backward(wanted: int, backend: str | None = None) -> tuple[Any, ...]:
        _, rstd, residual_out = norm_op.FORWARD(*of_forward(*leaves.values(), backend=backend))
        given = dy, x if residual_out is None else residual_out, weight, rstd, d_residual_out
        dtypes = [None if each is None else each.dtype for each in (x, residual, weight, bias)]
        return *given, wanted, dims, offset, casting, alpha, *dtypes, backend

    dys = (dy,) if residual is None else (dy, d_residual_out)
    return Call(leaves, {}, dys, public, by_op, exact, of_forward, of_backward)


def _autocast_norm(variant: Variant) -> tuple[dict[str, Any], torch.dtype | None]:
    """F.rms_norm's rule: y has its dtype, unless out_dtype says otherwise; a sum with a residual is not cast."""
    half = torch.ones(1, 8, dtype=BF16, device=DEVICE)
    with torch.autocast(DEVICE.type, BF16):
        if F.rms_norm(half, (8,)).dtype is BF16:
            return {}, None
    dtype = torch.promote_types(variant.dtype, FP32)
    options: dict[str, Any] = {"out_dtype": variant.out_dtype or dtype}
    return (options | {"casting": "once"}, None) if variant.has_residual else (options, dtype)


def of_rope(
    case: RopeCase, *, seed: int = 0, device: Any = DEVICE, made: rope_cases.RopeCall | None = None
) -> Call:
    made = made or rope_cases.make(case, device, seed)
    *heads, cos, sin, positions = made.tensors
    if case.has_rows_of_batch:  # functions take (B, T, R), backends (B * T, R)
        cos, sin = (each.unflatten(0, (case.batch, case.length)) for each in (cos, sin))
    names = ("q", "k", "q_weight", "k_weight") if case.heads[1] else ("x", "k", "weight", "k_weight")
    named = dict(zip(names, heads, strict=True))
    leaves = {name: each for name, each in named.items() if each is not None}
    tables = {"cos": cos, "sin": sin, "position_ids": positions}
    fixed = {name: each for name, each in tables.items() if each is not None}
    numbers, order = made.spec[1:-1], (*leaves, *fixed)

    def tensors(*given: Tensor) -> list[Any]:
        # Dynamo of 2.9 traces no zip(strict=False)
        by_name = {order[i]: each for i, each in enumerate(given)}
        return list((dict.fromkeys(named) | tables | by_name).values())

    def public(*given: Tensor, **changes: Any) -> Outputs:
        q, k, q_weight, k_weight, cos, sin, positions = tensors(*given)
        options = dict(zip(ROPE_OPTIONS, numbers, strict=True)) | {"position_ids": positions} | changes
        if k is None:
            return (rms_norm_rope(q, q_weight, cos, sin, **options),)
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, **options)

    def of_forward(*given: Tensor, backend: str | None = None) -> tuple[Any, ...]:
        return *tensors(*given), *numbers, backend

    def by_op(*given: Tensor, backend: str | None = None) -> Outputs:
        results = rope_op.FORWARD(*of_forward(*given, backend=backend))
        return tuple(each for each in results if each is not None)

    def exact(*given: Tensor) -> Outputs:
        plain = made.spec._replace(casting="once", rope_rounding="end")
        *heads, cos, sin, positions = tensors(*given)
        rows = [each.flatten(0, -2) for each in (cos, sin)]
        results = rope_cases.outputs_of(plain, (*heads, *rows, positions))
        return tuple(each for each in results if each is not None)

    def of_backward(wanted: int, backend: str | None = None) -> tuple[Any, ...]:
        return *made.dys, *heads, cos, sin, positions, wanted, *numbers, backend

    dys = tuple(each for each in made.dys if each is not None)
    return Call(leaves, fixed, dys, public, by_op, exact, of_forward, of_backward)


def _plan_of_rope(step: Any, architecture: int, casting: str) -> RopePlan | None:
    if not isinstance(step, RopeTiles):
        return None
    return RopePlan(rope_problem(20, 20, itemsize=4, architecture=architecture, casting=casting), step)


_PLACED, _PLACED_ROPE = Variant(FP32, (2, 6, 8)), RopeCase(n=8, rotary_dim=8)
_SMOOTH = Variant(FP64, (3, 5), weight_dtype=FP64)
_SMOOTH_HEADS = _SMOOTH._replace(size=(2, 3, 2, 5), weight="heads", bias_dtype=FP64, layout="heads")
_SEVERAL = Variant(BF16, (3, 40), weight_dtype=BF16, residual_dtype=BF16, bias_dtype=FP32, dims=2)
_SMOOTH_ROPE = RopeCase(FP64, 1, 2, (2, 1), 6, 6)
# No dtype of 16 bits in those that are smooth: what is rounded has no numerical derivative.
_NORM = Op(
    rms_norm,
    norm_op.FORWARD,
    norm_op.BACKWARD,
    of_norm,
    {name: each for name, each in VARIANTS.items() if name != "float64"} | {"several dimensions": _SEVERAL},
    (
        *("plain", "y of another dtype", "bias", "bias without a weight", "residual", "residual rounded"),
        *("residual of another dtype, alpha", "heads in place", "weights of heads", "all of it"),
        "several dimensions",
    ),
    ("plain", "bias without a weight", "all of it"),
    {
        "plain": _SMOOTH,
        "bias": _SMOOTH._replace(bias_dtype=FP64),
        "residual": _SMOOTH._replace(residual_dtype=FP64),
        "alpha": _SMOOTH._replace(
            residual_dtype=FP64, alpha=-0.3, bias_dtype=FP64, offset=1.0, casting="llama"
        ),
        "no weight": _SMOOTH._replace(weight="none", residual_dtype=FP64),
        "weights of heads": _SMOOTH_HEADS,
        "all of it": _SMOOTH_HEADS._replace(
            size=(2, 1, 2, 4), residual_dtype=FP64, alpha=0.5, offset=1.0, layout="mixed"
        ),
    },
    Variant(FP32, (6, 40), residual_dtype=FP32, bias_dtype=FP32),
    (
        Variant(BF16, (6, 40), residual_dtype=BF16),
        {
            "eps": (None, 0.5),
            "offset": (0.0, 1.0),
            "casting": ("once", "llama"),
            "residual_alpha": (1.0, 0.25),
            "residual_dtype": (None, FP32),
            "out_dtype": (None, FP32),
        },
    ),
    {
        "as F.rms_norm": _PLACED,
        "offset": _PLACED._replace(offset=1.0),
        "bfloat16": _PLACED._replace(dtype=BF16),
        "llama": _PLACED._replace(casting="llama"),
        "bias": _PLACED._replace(bias_dtype=FP32),
        "residual": _PLACED._replace(residual_dtype=FP32),
        "no weight": _PLACED._replace(weight="none"),
        "a bias alone, alpha": _PLACED._replace(
            weight="none", residual_dtype=FP32, bias_dtype=FP32, alpha=0.5
        ),
        "weights of heads": _PLACED._replace(size=(2, 3, 4, 8), weight="heads"),
    },
    lambda variant: variant._replace(size=(variant.size[0] + 2, *variant.size[1:])),
    lambda variant: [
        variant._replace(size=tuple(0 if at == i else each for at, each in enumerate(variant.size)))
        for i in range(min(2, len(variant.size) - 1))
    ],
    lambda variant: (9, 10, 13, 15) if variant.has_residual else (1, 2, 5, 7),
    ((norm_checks, "check_input"), (norm_eager, "gradients")),
    _autocast_norm,
)
_POSITIONS = rope_cases.CASES["positions of 32 bits"]
_PAIRS = {name: case for name, case in rope_cases.CASES.items() if case.heads[1]}
_PAIRS |= {
    "interleaved": RopeCase(BF16, interleaved=True, rotary_dim=32),
    "the norm rounded": _POSITIONS._replace(rounding="norm"),
    "each rounded": _POSITIONS._replace(casting="llama", rounding="each"),
    "all": rope_cases.CASES["all"]._replace(table_dtype=FP32),  # public calls take it, or that of q
}
_ROPE_OPTIONS = {
    "eps": (None, 0.5),
    "offset": (0.0, 1.0),
    "casting": ("once", "llama"),
    "rotary_dim": (64, 32),
    "interleaved": (False, True),
    "rope_rounding": ("end", "norm", "each"),
}
_ROPE = Op(
    qk_norm_rope,
    rope_op.FORWARD,
    rope_op.BACKWARD,
    of_rope,
    _PAIRS,
    (
        *("plain", "no weight", "weight of q alone", "weights of heads", "half tables", "rows of each batch"),
        *("positions of 32 bits", "beside a gate", "one step", "interleaved", "each rounded", "all"),
    ),
    ("plain", "no weight", "rows of each batch", "the norm rounded", "all"),
    {
        "plain": _SMOOTH_ROPE,
        "interleaved": _SMOOTH_ROPE._replace(interleaved=True, tables="half"),
        "a part": _SMOOTH_ROPE._replace(rotary_dim=2, offset=1.0),
        "a part, interleaved": _SMOOTH_ROPE._replace(rotary_dim=4, interleaved=True),
        "no weights": _SMOOTH_ROPE._replace(weight=("none", "none")),
        "weights of heads": _SMOOTH_ROPE._replace(batch=2, weight=("heads", "heads"), has_rows_of_batch=True),
        "positions": _SMOOTH_ROPE._replace(batch=2, positions="each"),
    },
    RopeCase(FP32, heads=(4, 4)),
    (_PAIRS["half tables"], _ROPE_OPTIONS),
    {
        **{
            f"{weight}, tables {rows}": _PLACED_ROPE._replace(weight=(weight, weight), has_rows_of_batch=own)
            for weight, (rows, own) in itertools.product(
                ("vector", "heads", "none"), (("T", False), ("BT", True))
            )
        },
        "positions": _PLACED_ROPE._replace(positions="each"),
        "positions of 32 bits": _PLACED_ROPE._replace(positions="one", position_dtype=torch.int32),
    },
    lambda case: case._replace(batch=case.batch + 1, length=case.length + 2),
    lambda case: [case._replace(batch=0), case._replace(length=0)],
    lambda case: range(4),
    ((rope, "checked_rope"), (rope_op, "checked_rope"), (rope_op, "checked_rope_backward")),
    plan_of=_plan_of_rope,
)
_ONE = {
    "one tensor": rope_cases.CASES["without k"],
    "interleaved": _PAIRS["interleaved"]._replace(heads=(3, 0)),
}
OPS = (
    _NORM,
    _ROPE,
    _ROPE._replace(
        function=rms_norm_rope,
        kinds=_ONE,
        usual=tuple(_ONE),
        few=("one tensor",),
        alike=RopeCase(FP32, heads=(4, 0)),
        options=(rope_cases.CASES["without k"]._replace(tables="half"), _ROPE_OPTIONS),
        placed={"one tensor": _PLACED_ROPE._replace(heads=(4, 0))},
        smooth={"one tensor": _SMOOTH_ROPE._replace(heads=(3, 0))},
    ),
)


def fresh(op: Op, kind: Any) -> Call:
    """Make a call of new numbers in each run; a failure prints the seed."""
    seed = random.SystemRandom().getrandbits(31)
    print("seed", seed)
    return op.make(kind, seed=seed)


def usual(op: Op) -> Mapping[str, Any]:
    """The others differ in tiles of kernels, or are two of these: --every-config asks them, too."""
    return op.kinds if helpers.every_config else {name: op.kinds[name] for name in op.usual}


def few(op: Op) -> dict[str, Any]:
    return {name: op.kinds[name] for name in op.few}


def ends(op: Op) -> dict[str, Any]:
    """The first and the last of few, which has most options: --every-config asks all of these."""
    return few(op) if helpers.every_config else {name: op.kinds[name] for name in (op.few[0], op.few[-1])}


def fewest(op: Op) -> dict[str, Any]:
    return {op.few[-1]: op.kinds[op.few[-1]]}


def of_options(op: Op) -> dict[str, Any]:
    return {"options": op.options[0]}


def of_each_op(
    kinds: Callable[[Op], Mapping[str, Any]] = few, *, is_long: bool = False
) -> pytest.MarkDecorator:
    """Give a test each op, and each of these kinds of its calls. is_long: all ops but the first are slow."""
    cases = [
        pytest.param(
            op, kind, id=f"{op.name}, {name}", marks=[pytest.mark.slow] * (is_long and op is not OPS[0])
        )
        for op in OPS
        for name, kind in kinds(op).items()
    ]
    return pytest.mark.parametrize(("op", "kind"), cases)


each_op = pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
every_kind = of_each_op(lambda op: op.kinds)
usual_kinds = of_each_op(usual)
each_smooth_kind = of_each_op(lambda op: op.smooth)


def note_unknown(op: Op, patch: pytest.MonkeyPatch) -> list[str]:
    """Note from now on what a known call does not run."""
    seen: list[str] = []
    for owner, name in op.unknown:
        original = getattr(owner, name)

        def noted(*given: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            seen.append(name)
            return original(*given, **named)

        patch.setattr(owner, name, noted)
    return seen


def note_backends(
    patch: pytest.MonkeyPatch, look: Callable[[Sequence[Any]], object] = lambda tensors: None
) -> list[str]:
    """Note from now on the backend of each function that runs. look: is shown the tensors that it gets."""
    ran: list[str] = []
    for backend in AUTO_ORDER:
        with contextlib.suppress(ImportError):
            registry._implemented_ops(backend)

    def noting(backend: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (ran.append(backend), look(given[1])) and run(*given)

    noted = {(op, backend): noting(backend, run) for (op, backend), run in registry._impls.items()}
    patch.setattr(registry, "_impls", noted)
    patch.setattr(registry, "_chosen", {})
    known_calls.forget()
    return ran


def present(results: Any) -> list[Tensor]:
    """Return the results of a library op that are not None. An op of one result returns no tuple."""
    return [each for each in (results if isinstance(results, tuple) else (results,)) if each is not None]


def assert_same_bits(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
