# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Levels of reproducibility on a GPU: each row of a batch has the bits that it has alone, at every position; dw has the
same bits however many SMs there are, and with padding behind the rows.

    python3 -m pytest tests/gpu/test_gpu_levels.py                    a case for each kernel
    python3 -m pytest tests/gpu/test_gpu_levels.py --every-config     all widths, dtypes and forms
"""

from typing import NamedTuple

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, every_config
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope, reproducible, rms_norm, rms_norm_forward
from tilegym_rmsnorm.routes import known_calls

pytestmark = pytest.mark.usefixtures("poisoned_empty")

POOL = 48  # rows, each of which is run alone
ROWS = (2, 3, 16, 255, 256, 257, 1000, 1024, 1025, 4096, 30000, 131072)
MOST = 2**27  # elements of x
INTEGERS = {2: torch.int16, 4: torch.int32}
EVERY_WIDTH = [
    int(each)
    for each in (
        "1 7 16 64 72 80 100 128 211 256 300 512 516 693 768 1000 1024 1165 1536 1900 2048 2051 2180 2560 "
        "2880 3001 3072 4096 5000 5120 6144 7168 8192 8200 9216 9748 10240 12288 13790 14336 16384 16400 "
        "18432 20480 24576 28672 32768 40000 65536 "
    ).split()
]
FORMS = (
    "plain", "float32 weight", "no weight", "llama", "residual",
    "bias", "heads", "frozen", "strided", "unaligned",
)  # fmt: skip


class Case(NamedTuple):
    n: int
    dtype: torch.dtype = BF16
    form: str = "plain"

    def __str__(self) -> str:
        return f"{self.n}-{str(self.dtype)[6:]}-{self.form.replace(' ', '-')}"


EVERY_CASE = [
    Case(n, dtype, form)
    for n in EVERY_WIDTH
    for dtype in (BF16, FP16, FP32)
    for form in FORMS
    if not (form == "heads" and n > 2048 or form == "float32 weight" and dtype == FP32)
]
A_CASE_A_KERNEL = [
    *(
        Case(n)
        for n in (7, 64, 211, 1024, 2560, 3001, 4096, 5120, 7168, 8192, 12288, 13790, 18432, 28672, 65536)
    ),
    *(Case(n, FP16) for n in (4096, 7168, 8192, 32768)),
    *(Case(n, FP32) for n in (7, 693, 5120, 8192, 13790, 16384, 28672)),
    *(Case(n, BF16, "residual") for n in (100, 516, 1900, 2180, 2880, 4096, 7168, 8192, 9216, 16384, 20480)),
    *(Case(n, FP32, "residual") for n in (9216, 13790, 16384, 20480)),
    *(
        Case(n, BF16, form)
        for form in ("float32 weight", "llama", "bias", "frozen")
        for n in (1000, 4096, 8192, 28672)
    ),
    *(Case(n, BF16, form) for form in ("strided", "unaligned") for n in (1024, 3001, 4096, 20480)),
    *(Case(n, dtype, "heads") for dtype in (BF16, FP32) for n in (64, 80, 128, 1024)),
]
CASES = EVERY_CASE if every_config else A_CASE_A_KERNEL


@pytest.fixture(autouse=True)
def kernels_alone(backend):
    if backend == "torch":
        pytest.skip("it has no kernels")


class Pool:
    """Rows, and what stands beside them."""

    def __init__(self, case: Case) -> None:
        n, dtype, form = case
        heads = (6,) if form == "heads" else ()
        self.case = case
        self.x, self.dy, self.residual = (
            torch.randn(POOL, *heads, n, device=DEVICE).to(dtype) for _ in range(3)
        )
        weight = torch.randn(*heads, n, device=DEVICE).to(FP32 if form == "float32 weight" else dtype)
        self.weight = None if form == "no weight" else weight.requires_grad_()
        self.bias = torch.randn(n, device=DEVICE).to(dtype).requires_grad_() if form == "bias" else None

    def run(self, index: Tensor, backend: str) -> dict[str, Tensor]:
        """Run the rows at these indices as one batch."""
        form = self.case.form
        x, dy = placed(self.x[index], form), placed(self.dy[index], form)
        residual = placed(self.residual[index], form).requires_grad_() if form == "residual" else None
        x.requires_grad_()
        casting = "llama" if form == "llama" else "once"
        out = rms_norm(
            x, self.case.n, self.weight, bias=self.bias, residual=residual, casting=casting, backend=backend
        )
        wanted = [
            each for each in (x, residual, self.weight, self.bias) if each is not None and each.requires_grad
        ]
        outs, dys = ([out], [dy]) if residual is None else (list(out), [dy, dy.flip(-1)])
        found = torch.autograd.grad(outs, wanted, dys)
        results = {"y": outs[0], "dx": found[0]} | ({} if residual is None else {"residual_out": outs[1]})
        options = {"bias": self.bias, "residual": residual, "casting": casting, "backend": backend}
        y, *_, rstd = rms_norm_forward(x, self.weight, **options)
        results |= {"y without autograd": y, "rstd": rstd.view(*x.shape[:-1], 1)}
        return {name: each.detach() for name, each in results.items()}


def placed(rows: Tensor, form: str) -> Tensor:
    """Lay rows out in memory as the form says."""
    if form == "strided":
        wide = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + (16 if rows.shape[-1] % 16 == 0 else 5))
        rows = wide[..., : rows.shape[-1]].copy_(rows)
    elif form == "unaligned":
        rows = rows.new_empty(rows.numel() + 1)[1:].view(rows.shape).copy_(rows)
    return rows


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.itemsize]).flatten(1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(case, backend):
    pool = Pool(case)
    with reproducible("batch"):
        alone = [pool.run(torch.tensor([i], device=DEVICE), backend) for i in range(POOL)]
        expected = {name: torch.cat([each[name] for each in alone]) for name in alone[0]}
        differing = []
        if case.form == "frozen":  # from here on: dx is that of a trained weight
            pool.weight.requires_grad_(False)
        for m in ROWS:
            if m * pool.x[0].numel() <= MOST:
                index = torch.randint(POOL, (m,), device=DEVICE)
                for name, each in pool.run(index, backend).items():
                    count = int((bits(each) != bits(expected[name])[index]).any(1).sum())
                    differing += [f"{count} of {m} rows of {name}"] if count else []
    assert not differing


OF_DW = [Case(n, dtype) for n in (64, 1024, 4096, 7168, 20480) for dtype in (BF16, FP32)]


def gradients_of_vectors(pool: Pool, m: int, padding: int, backend: str) -> list[Tensor]:
    """dw, and db if there is a bias, of m rows and rows behind them whose dy is zero."""
    case, generator = pool.case, torch.Generator(DEVICE).manual_seed(m)
    x, dy = (torch.randn(m, case.n, device=DEVICE, generator=generator).to(case.dtype) for _ in range(2))
    x = torch.cat((x, torch.randn(padding, case.n, device=DEVICE).to(case.dtype))).requires_grad_()
    dy = torch.cat((dy, dy.new_zeros(padding, case.n)))
    residual = torch.zeros_like(x) if case.form == "residual" else None
    out = rms_norm(x, case.n, pool.weight, bias=pool.bias, residual=residual, backend=backend)
    vectors = [each for each in (pool.weight, pool.bias) if each is not None]
    return list(torch.autograd.grad(out if residual is None else out[0], vectors, dy))


def tell_sms(monkeypatch: pytest.MonkeyPatch, backend: str, count: int) -> None:
    """Let a backend count so many SMs."""
    known_calls.forget()
    if backend == "triton":
        from tilegym_rmsnorm.backends.triton import host

        monkeypatch.setattr(host, "sm_count", lambda device: count)
        return
    from tilegym_rmsnorm.backends.cutile.host.launcher import launcher_of
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    launcher_of.cache_clear()
    machine = machine_of(torch.device("cuda", torch.cuda.current_device()))
    facts = machine.facts._replace(sm_count=count, most_members=max(1, count // 8))
    monkeypatch.setattr(machine, "facts", facts)


@pytest.mark.parametrize("case", OF_DW, ids=str)
@pytest.mark.parametrize("form", ["plain", "residual", "bias"])
def test_dw_depends_on_neither_padding_nor_the_number_of_sms(case, form, backend, monkeypatch):
    if form == "bias" and case.n > 8192:
        pytest.skip("PyTorch's operations sum db of such rows")
    pool, expected = Pool(case._replace(form=form)), {}
    with reproducible("device"):
        for m in (1, 100, 3000):
            expected[m] = gradients_of_vectors(pool, m, 0, backend)
            for padding in (1, 77, 5000):
                found = gradients_of_vectors(pool, m, padding, backend)
                assert all(map(torch.equal, found, expected[m]))
        for count in (16, 78, 132, 148):
            with monkeypatch.context() as patched:
                tell_sms(patched, backend, count)
                if backend == "cutile" and case.n == 20480 and count < 8 * 5:
                    with pytest.raises(ValueError, match="teams of 5 blocks"):
                        gradients_of_vectors(pool, 100, 0, backend)
                    continue
                for m, each in expected.items():
                    assert all(map(torch.equal, gradients_of_vectors(pool, m, 0, backend), each))
    tell_sms(monkeypatch, backend, torch.cuda.get_device_properties(0).multi_processor_count)


@pytest.mark.parametrize("head, rotary", [(64, 64), (128, 128), (128, 64), (256, 256)])
def test_rope(head, rotary, backend):
    """One token alone, and in batches of any B and T."""
    q, k = (
        torch.randn(6, 40, 8, head, device=DEVICE, dtype=BF16),
        torch.randn(6, 40, 2, head, device=DEVICE, dtype=BF16),
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    weights = [torch.randn(head, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2)]
    angles = torch.randn(40, rotary // 2, device=DEVICE)
    cos, sin = (each.to(BF16).repeat(1, 2) for each in (angles.cos(), angles.sin()))

    def run(b, t):
        given = [each[b, t].clone().requires_grad_() for each in (q, k)]
        out = qk_norm_rope(*given, *weights, cos[t], sin[t], rotary_dim=rotary, backend=backend)
        return *out, *torch.autograd.grad(out, given, [dq[b, t], dk[b, t]])

    with reproducible("batch"):
        whole = run(slice(None), slice(None))
        for b, t in (
            (slice(3, 4), slice(7, 8)),
            (slice(2, 3), slice(None)),
            (slice(None), slice(7, 8)),
            (slice(1, 4), slice(3, 20)),
        ):
            for one, every in zip(run(b, t), whole, strict=True):
                assert torch.equal(one, every[b, t])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", EVERY_WIDTH if every_config else (1, 72, 1024, 2880, 4096, 5120, 16384, 18432))
def test_vllms_bits(n, dtype, backend):
    """Of rows and of a rounded sum, beside the kernel of support/vllm_kernel.py."""
    if backend != "triton":
        pytest.skip("Triton alone has that order")
    import vllm_kernel

    x, residual = (torch.randn(1003, n, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(n, device=DEVICE).to(dtype)
    with reproducible(order="vllm"):
        for rows in (x, placed(x, "strided"), placed(x, "unaligned")):
            y = rms_norm(rows, n, weight, 1e-6, backend=backend)
            assert torch.equal(y, vllm_kernel.rms_norm(x, weight, 1e-6))
        y, total = rms_norm(x, n, weight, 1e-6, residual=residual, backend=backend)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, vllm_kernel.rms_norm(total, weight, 1e-6))
