# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter accepts and refuses what the compiler does: both get the kernels of interpreter_cases.py."""

import inspect
import io
import itertools
import typing
from collections.abc import Callable

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
    TupleConstraint,
    export_kernel,
)
from interpreter_cases import FLOATS
from interpreter_cases_of_tuples import CASES

from tilegym_rmsnorm.backends.cutile.interpreter import launch
from tilegym_rmsnorm.backends.cutile.interpreter.dtypes import TILE_DTYPE, TORCH_DTYPE, promote
from tilegym_rmsnorm.backends.cutile.runtime import toolchain

needs_tileiras = pytest.mark.skipif(toolchain.find_tileiras() is None, reason="needs tileiras")


def constraint_of(value: object) -> ArrayConstraint | ScalarConstraint | TupleConstraint:
    if isinstance(value, tuple):
        return TupleConstraint(tuple(map(constraint_of, value)))
    if not isinstance(value, torch.Tensor):
        return ScalarConstraint(ct.int32 if isinstance(value, int) else ct.float32)
    return ArrayConstraint(
        TILE_DTYPE[value.dtype],
        value.ndim,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
    )


def copied(value):
    """Clone tensors, also in tuples."""
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def compile_for_sm_90(function: Callable, args: tuple, output_format: str = "cubin") -> None:
    """Compile for args as ct.launch would. "tileir_bytecode" stops where types are known: faster."""
    hints = typing.get_type_hints(function, include_extras=True)
    constraints = [
        ConstantConstraint(value) if name in hints else constraint_of(value)
        for name, value in zip(inspect.signature(function).parameters, args, strict=True)
    ]
    has_tuple = any(isinstance(value, tuple) for value in args)
    convention = CallingConvention.cutile_python_v2 if has_tuple else CallingConvention.cutile_python_v1
    signature = KernelSignature(constraints, convention())
    export_kernel(
        ct.kernel(function), [signature], io.BytesIO(), gpu_code="sm_90", output_format=output_format
    )


@pytest.mark.parametrize(("function", "args", "is_accepted"), CASES)
def test_interpreter_accepts_and_refuses(function, args, is_accepted):
    args = copied(tuple(args.values()))
    if is_accepted:
        launch(function, (1,), args)
    else:
        with pytest.raises(
            (TypeError, ValueError, IndexError, RuntimeError), match=r"\[block \(0, 0, 0\) of "
        ) as caught:
            launch(function, (1,), args)
        assert not isinstance(caught.value, NotImplementedError)  # a RuntimeError, but no refusal


@needs_tileiras
@pytest.mark.parametrize(("function", "args", "is_accepted"), CASES)
def test_compiler_accepts_and_refuses_the_same(function, args, is_accepted):
    if is_accepted:
        compile_for_sm_90(function, tuple(args.values()))
    else:
        with pytest.raises(ct.TileError):
            compile_for_sm_90(function, tuple(args.values()))


def promotes(a: ct.DType, b: ct.DType, expected: ct.DType) -> Callable:
    def kernel(x):
        total = ct.where(x.shape[0] > 0, ct.ones((4,), a), ct.ones((4,), b))
        ct.static_assert(total.dtype == expected)
        ct.store(x, (0,), ct.astype(total, x.dtype))

    return kernel


@needs_tileiras
def test_dtypes_promote_as_in_the_compiler():
    for a, b in itertools.product(TILE_DTYPE.values(), repeat=2):
        try:
            common = TILE_DTYPE[promote(TORCH_DTYPE[a], TORCH_DTYPE[b])]
        except TypeError:
            with pytest.raises(ct.TileError, match="promotion"):
                compile_for_sm_90(promotes(a, b, ct.float32), (FLOATS,), "tileir_bytecode")
        else:
            compile_for_sm_90(promotes(a, b, common), (FLOATS,), "tileir_bytecode")
