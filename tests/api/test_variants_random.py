# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Random kinds of calls, layouts and sizes on each backend, and how tensors are laid out for one."""

from __future__ import annotations

import pytest
import torch
from helpers import BF16, FP16, FP32, HAS_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from variants import LAYOUTS, Variant, check_all, make, run

from tilegym_rmsnorm.backends.layout import as_rows, view_of_vector, viewed, views_of

DTYPES = st.sampled_from((BF16, FP16, FP32))
MAYBE = st.none() | DTYPES
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
COLUMNS = st.sampled_from((1, 7, 16, 33, 64, 128))


@st.composite
def variants(draw) -> Variant:
    leading = draw(SIZES)
    residual_dtype = draw(MAYBE)
    return Variant(
        dtype=draw(DTYPES),
        size=(*leading, draw(COLUMNS)),
        weight=draw(st.sampled_from(("none", "vector", "heads"))),
        weight_dtype=draw(DTYPES),
        bias_dtype=draw(MAYBE),
        residual_dtype=residual_dtype,
        residual_out_dtype=draw(MAYBE) if residual_dtype else None,
        alpha=draw(st.sampled_from((1.0, 0.22, -2.0))) if residual_dtype else 1.0,
        out_dtype=draw(MAYBE),
        offset=draw(st.sampled_from((0.0, 1.0, -0.5))),
        casting=draw(st.sampled_from(("once", "llama"))),
        layout=draw(st.sampled_from(tuple(LAYOUTS))),
    )


@pytest.mark.parametrize("backend", ["torch", "triton", "cutile"], indirect=True)
@settings(
    max_examples=200 if HAS_GPU else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(variant=variants(), seed=st.integers(0, 2**31))
def test_any_call(backend, variant, seed):
    inputs = make(variant, seed=seed)
    check_all(variant, inputs, run(variant, inputs, backend))


@st.composite
def tensors_of_one_shape(draw) -> tuple[int, int, list[torch.Tensor]]:
    """n, heads and tensors, each some view of some memory."""
    shape = (*draw(SIZES), draw(st.sampled_from((1, 2, 5))))
    n = shape[-1]
    heads = shape[-2] if draw(st.booleans()) and shape[-2] > 1 else 0
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        parent = torch.arange(6 * torch.Size(shape).numel()).view(*(shape[d] for d in order), 6)
        view = parent[..., draw(st.integers(0, 5))].permute(*(order.index(d) for d in range(len(shape))))
        kind = draw(st.sampled_from(("as it is", "packed", "packed in order", "expanded")))
        if kind != "as it is":
            packed = view.permute(*order).contiguous()
            view = packed.permute(*(order.index(d) for d in range(len(shape))))
        if kind == "packed in order":
            view = view.contiguous()
        if kind == "expanded":
            view = view[:1].expand(shape)
        tensors.append(view)
    return n, heads, tensors


def arranged(n: int, heads: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return viewed(tensors, views_of(n, heads, tensors))


@settings(max_examples=400, deadline=None)
@given(tensors_of_one_shape())
def test_what_backends_are_given(case):
    """Values and their order stay, in one layout of contract.py."""
    n, heads, tensors = case
    *given, absent = arranged(n, heads, *tensors, None)
    assert absent is None
    for tensor, rows in zip(tensors, given, strict=True):
        assert torch.equal(rows.flatten(), tensor.flatten())
        assert rows.shape == given[0].shape and rows.stride(-1) == 1 and rows.shape[-1] == n
        if rows.ndim == 2:
            assert rows.stride(0) >= n and not heads
        else:
            assert rows.ndim == 4 and (not heads or rows.shape[2] == heads)
            assert all(s > 0 for e, s in zip(rows.shape, rows.stride(), strict=True) if e > 1)


VIEWS = {  # what is read in place, and in what shape
    "a q slice": (lambda: torch.empty(2, 3, 3, 4, 8)[:, :, 0], (1, 6, 4, 8)),
    "transposed": (lambda: torch.empty(2, 4, 3, 8).transpose(1, 2), (2, 3, 4, 8)),
    "rows of a wider tensor": (lambda: torch.empty(6, 4, 16)[..., :8], (24, 8)),
    "every other head": (lambda: torch.empty(2, 3, 8, 8)[:, :, ::2], (24, 8)),
    "a sequence without its first token": (lambda: torch.empty(2, 257, 8)[:, 1:], (2, 256, 1, 8)),
    "few tokens without the first": (lambda: torch.empty(2, 256, 8)[:, 1:], (1, 2, 255, 8)),
    "heads before a sequence": (lambda: torch.empty(2, 300, 4, 8).transpose(1, 2), (2, 4, 300, 8)),
    "sequence first": (lambda: torch.empty(3, 2, 4, 8).transpose(0, 1), (2, 3, 4, 8)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_not_copied(name):
    make_view, shape = VIEWS[name]
    view = make_view()
    (rows,) = arranged(8, 0, view)
    assert rows.data_ptr() == view.data_ptr()
    assert rows.shape == shape


UNREADABLE = {  # n, and what is copied
    "rows that are one": (8, lambda: torch.randn(1, 8).expand(6, 8)),
    "rows that overlap": (8, lambda: torch.randn(20).unfold(0, 8, 2)),
    "rows of a batch that overlap": (8, lambda: torch.randn(2, 20).unfold(1, 8, 2)),
    "heads that overlap": (8, lambda: torch.randn(2, 3, 20).unfold(2, 8, 4)),
    "columns apart": (8, lambda: torch.randn(6, 16)[:, ::2]),
    "columns of a batch apart": (8, lambda: torch.randn(2, 3, 16)[..., ::2]),
    "one column of several": (1, lambda: torch.randn(6, 2)[:, ::2]),
    "one column of several of a batch": (1, lambda: torch.randn(2, 3, 2)[..., ::2]),
    "one column of several of heads": (1, lambda: torch.randn(2, 4, 3, 2)[..., ::2].transpose(1, 2)),
    "one column of any stride": (1, lambda: torch.randn(6).as_strided((6, 1), (1, 7))),
    "one column of any stride of a batch": (1, lambda: torch.randn(6).as_strided((2, 3, 1), (3, 1, 7))),
    "one element of any stride": (1, lambda: torch.randn(1).as_strided((1, 1, 1), (0, 0, 0))),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_copied(name):
    """Kernels read rows whose columns follow one another and that do not overlap; interpreters would take any."""
    n, make_view = UNREADABLE[name]
    view = make_view()
    for rows in (*arranged(n, 0, view), as_rows(view, n)):
        assert torch.equal(rows.flatten(), view.flatten()) and rows.data_ptr() != view.data_ptr()
        assert rows.stride(-1) == 1 and rows.stride(-2) >= n


@pytest.mark.parametrize(
    ("heads", "vector"),
    [
        (0, torch.randn(1).as_strided((1,), (7,))),
        (0, torch.randn(1).as_strided((1, 1), (7, 7))),
        (3, torch.randn(3).as_strided((3, 1), (1, 7))),
        (3, torch.randn(3).as_strided((3, 1, 1), (1, 7, 7))),
    ],
)
def test_a_weight_of_one_column_has_stride_1(heads, vector):
    """PyTorch takes any stride of it for contiguous."""
    assert vector.is_contiguous()
    (arranged,) = viewed([vector], [view_of_vector(vector, 1, heads)])
    assert arranged.shape == ((3, 1) if heads else (1,)) and arranged.stride(-1) == 1
    assert torch.equal(arranged.flatten(), vector.flatten())


def test_q_beside_the_gradient_that_attention_leaves():
    q, dy = torch.empty(2, 3, 3, 4, 8)[:, :, 0], torch.empty(2, 4, 3, 8).transpose(1, 2)
    for heads in (0, 4):
        rows = arranged(8, heads, q, dy, None)
        assert [each.data_ptr() for each in rows[:2]] == [q.data_ptr(), dy.data_ptr()]
        assert rows[0].shape == (2, 3, 4, 8) and rows[2] is None


@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 8)])
def test_four_dimensions_that_do_not_merge_are_copied(shape):
    view = torch.empty(2 * 2, 3 * 2, 5 * 2, 7 * 2, 8)[::2, ::2, ::2, ::2]
    (rows,) = arranged(8, 0, view)
    assert rows.shape == (210, 8) and rows.is_contiguous()
