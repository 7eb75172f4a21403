# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""warmup for calls with a residual, a bias, heads and several dtypes: after it no such call compiles anything."""

import itertools
import random

import pytest
import torch
from helpers import DEVICE

import tilegym_rmsnorm as tr

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from counting import META, Case, CountingMachine  # noqa: E402

from tilegym_rmsnorm.backends import cutile, refusals  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import warm as warm_module  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


CASES = {
    "residual": Case((1024, BF16), {"residual": BF16}),
    "residual, float32 weight": Case((4096, BF16, FP32), {"residual": BF16}),
    "residual, alpha": Case((1024, BF16), {"residual": BF16, "residual_alpha": 0.22}),
    "residual in float32": Case((2880, BF16), {"residual": FP32, "residual_dtype": FP32}),
    "residual kept in float32": Case((4096, BF16), {"residual": BF16, "residual_dtype": FP32}),
    "residual, not aligned": Case((1001, BF16), {"residual": BF16}),
    "residual without a weight": Case((4096, FP32, None), {"residual": FP32}),
    "residual, wide": Case((20480, BF16), {"residual": BF16}),
    "bias": Case((1024, BF16), {"bias": BF16}),
    "bias, wide": Case((12288, BF16), {"bias": FP32}),
    "bias without a weight": Case((512, FP16, None), {"bias": FP32}),
    "residual and bias": Case((1024, FP16, FP32), {"residual": FP16, "bias": FP32}),
    "out_dtype": Case((1024, BF16), {"out_dtype": FP32}),
    "llama": Case((1024, BF16), {"casting": "llama", "residual": BF16}),
}
HEADS = {
    "weights of heads": Case((128, BF16), {"heads": 8}),
    "weights of 5 heads": Case((80, BF16, FP32), {"heads": 5}),
    "weights of heads, bias, residual": Case((64, BF16), {"heads": 4, "bias": BF16, "residual": BF16}),
    "weights of heads, composed": Case((4096, BF16), {"heads": 2}),
    "strided": Case((128, BF16), {"strided_heads": 8}),
    "strided, 28 heads of float32": Case((80, FP32), {"strided_heads": 28}),
    "strided, wide": Case((2048, BF16), {"strided_heads": 3}),
    "strided, residual": Case((64, BF16), {"strided_heads": 32, "residual": BF16}),
    "strided, several dtypes": Case((96, BF16), {"strided_heads": 4, "out_dtype": FP32}),
}


def warmed(machine: CountingMachine, case: Case) -> set:
    tr.warmup(case.width, **case.options, device="cuda:0")
    return set(machine.kernels)


def step(
    case: Case,
    lead: tuple[int, ...],
    layout: str = "packed",
    uses_sum: bool = True,
    device: torch.device = META,
) -> None:
    """The forward and the backward of a call that the case describes. layout: of x and residual, slices or transposed;
    of the gradients, transposed. uses_sum: whether the loss does, of a residual."""
    (n, dtype, *weight_dtype), options = case
    weight_dtype = weight_dtype[0] if weight_dtype else dtype
    heads = options.get("heads")
    of_vectors = (heads, n) if heads else (n,)

    def vector(dtype: torch.dtype | None) -> torch.Tensor | None:
        return (
            None if dtype is None else torch.empty(of_vectors, dtype=dtype, device=device, requires_grad=True)
        )

    residual = options.get("residual")
    given = {name: options[name] for name in ("residual_dtype", "out_dtype", "casting") if name in options}
    if residual is not None:
        given |= {"residual": rows(lead, n, residual, layout, device).requires_grad_()}
        given |= {"residual_alpha": options.get("residual_alpha", 1.0)}
    x = rows(lead, n, dtype, layout, device).requires_grad_()
    given["bias"] = vector(options.get("bias"))
    results = tr.rms_norm(x, (n,), vector(weight_dtype), 1e-5, **given, backend="cutile")
    results = results if isinstance(results, tuple) else (results,)
    results = results if uses_sum else results[:1]
    of_gradients = "transposed" if layout != "packed" else layout
    torch.autograd.backward(results, [rows(lead, n, each.dtype, of_gradients, device) for each in results])


def rows(
    lead: tuple[int, ...], n: int, dtype: torch.dtype, layout: str, device: torch.device
) -> torch.Tensor:
    if layout == "slices":
        *before, heads = lead
        return torch.empty(*before, 3, heads, n, dtype=dtype, device=device)[..., 1, :, :]
    if layout == "transposed":
        b, t, heads = lead
        return torch.empty(b, heads, t, n, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(*lead, n, dtype=dtype, device=device)


@pytest.mark.parametrize("name", CASES)
def test_no_number_of_rows_compiles_after_it(on_meta, name):
    case, chance = CASES[name], random.Random(name)
    kernels = warmed(on_meta, case)
    edge = 4 * 2**20 // case.width[0]
    counts = {*range(1, 20), 1023, 1024, 1025, 1040, edge, edge + 1, edge // 16 * 16 + 16, 2 * edge + 1}
    counts |= {int(2 ** chance.uniform(0, 16)) for _ in range(60)}
    for m, uses_sum in itertools.product(sorted(counts), {True, "residual" not in case.options}):
        step(case, (m,), uses_sum=uses_sum)
        assert on_meta.kernels == kernels, f"M = {m} needs {on_meta.kernels - kernels}"


def test_nothing_is_compiled_that_no_call_needs(on_meta):
    case = CASES["residual"]
    kernels = warmed(on_meta, case)
    on_meta.kernels.clear()
    for m, uses_sum in itertools.product((*range(1, 300), *range(1008, 6000, 8), 5001), (True, False)):
        step(case, (m,), uses_sum=uses_sum)
    assert on_meta.kernels == kernels


def test_other_calls_are_others(on_meta):
    """Each argument matters: nothing is compiled that is not asked for."""
    plain = warmed(on_meta, Case((1024, BF16), {}))
    others = ({"residual": BF16}, {"bias": BF16}, {"out_dtype": FP32}, {"heads": 2}, {"strided_heads": 2})
    for options in others:
        on_meta.kernels.clear()
        assert not warmed(on_meta, Case((1024, BF16), options)) <= plain
    on_meta.kernels.clear()
    alone = warmed(on_meta, Case((1024, BF16), {"residual": BF16}))
    for options in ({"residual_alpha": 0.5}, {"residual_dtype": FP32}):
        on_meta.kernels.clear()
        assert not warmed(on_meta, Case((1024, BF16), {"residual": BF16} | options)) <= alone


@pytest.mark.parametrize("name", HEADS)
def test_no_batch_of_heads_compiles_after_it(on_meta, name):
    case, chance = HEADS[name], random.Random(name)
    heads = case.options.get("heads") or case.options["strided_heads"]
    kernels = warmed(on_meta, case)
    leads = {(b, t) for b in (1, 2, 3, 16, 33) for t in (1, 2, 15, 16, 17, 64, 100, 4096)}
    leads |= {(t, b) for b, t in leads}
    leads |= {tuple(int(2 ** chance.uniform(0, top)) for top in (6, 12)) for _ in range(60)}
    for (b, t), layout in itertools.product(sorted(leads), ("packed", "slices", "transposed")):
        step(case, (b, t, heads), layout, uses_sum=chance.random() < 0.7)
        assert on_meta.kernels == kernels, f"{(b, t)}, {layout}: needs {on_meta.kernels - kernels}"


@pytest.mark.parametrize("width", [(512, BF16), (64, BF16), (2048, FP32)], ids=str)
def test_no_sequence_without_its_first_tokens_compiles_after_it(on_meta, width):
    """x[:, 1:], which is rows of one head to `warmup` if it is of 256 tokens or more."""
    n, dtype = width
    chance = random.Random(n)
    kernels = warmed(on_meta, Case(width, {"strided_heads": 1}))
    leads = set(itertools.product((2, 3, 16, 33), (256, 257, 272, 1000, 4095, 4096)))
    leads |= {(int(2 ** chance.uniform(1, 6)), int(2 ** chance.uniform(8, 13))) for _ in range(60)}
    for (b, t), first in itertools.product(sorted(leads), (0, 1, 8)):
        x, dy = (
            torch.empty(b, t + skipped, n, dtype=dtype, device=META)[:, skipped:] for skipped in (first, 1)
        )
        weight = torch.empty(n, dtype=dtype, device=META, requires_grad=True)
        tr.rms_norm(x.requires_grad_(), (n,), weight, 1e-5, backend="cutile").backward(dy)
        assert on_meta.kernels == kernels, f"{(b, t)}: needs {on_meta.kernels - kernels}"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual_alpha": 0.5}, ValueError, "residual_alpha: expected 1.0 without a residual, got 0.5"),
        ({"residual_dtype": FP32}, ValueError, "residual_dtype: expected None without a residual"),
        ({"residual": BF16, "residual_alpha": "1"}, TypeError, "residual_alpha: expected a finite number"),
        ({"residual": True}, TypeError, "residual: expected None or a dtype of "),
        ({"residual": BF16, "residual_dtype": torch.int8}, TypeError, "residual_dtype: expected None or a"),
        ({"bias": True}, TypeError, "bias: expected None or a dtype of "),
        ({"out_dtype": "float32"}, TypeError, "out_dtype: expected None or a dtype of "),
        ({"heads": 0}, ValueError, "heads: expected at least 1, or None, got 0"),
        ({"strided_heads": 1.5}, TypeError, "strided_heads: expected an int or None, got 1.5"),
        ({"heads": 4, "strided_heads": 4}, ValueError, "strided_heads: expected None beside heads"),
    ],
)
def test_what_is_no_call_is_refused(monkeypatch, options, error, message):
    monkeypatch.setattr(warm_module, "warm", lambda *_: pytest.fail("compiled"))
    with pytest.raises(error, match=message):
        tr.warmup((64, BF16), **options, device="cuda:0")


@pytest.mark.parametrize("name", ["bias", "residual", "out_dtype"])
def test_dtypes_that_no_kernel_takes_are_refused(monkeypatch, name):
    monkeypatch.setattr(cutile, "unusable", refusals.tensors_unusable)
    with pytest.raises(
        tr.BackendUnavailableError, match="float32, not torch.float64. To mend it: use backend"
    ):
        tr.warmup((64, BF16), **{name: torch.float64}, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["residual", "residual, alpha", "bias", "weights of heads", "strided"])
def test_no_call_compiles_after_it_on_a_gpu(name, compilations):
    """Neither anew nor from the disk cache."""
    case = (CASES | HEADS)[name]
    tr.warmup(case.width, **case.options)
    assert len(compilations) >= 5
    compilations.clear()
    heads = case.options.get("heads") or case.options.get("strided_heads")
    leads = [(1,), (2,), (16,), (17,), (1000,), (1024,), (2112,), (5000,), (16384,)]
    if heads:
        leads = [(b, t, heads) for b in (1, 3, 16) for t in (1, 7, 16, 100, 2048)]
    layouts = ("packed", "slices", "transposed") if heads else ("packed",)
    for lead, layout in itertools.product(leads, layouts):
        step(case, lead, layout, device=DEVICE)
        assert not compilations, f"{lead}, {layout}: {compilations}"
