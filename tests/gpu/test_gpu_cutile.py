# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cuTile kernels on a GPU: dx alone, a partial row of dw for each row, and what is compiled when."""

import functools
from collections import Counter

import plain_calls
import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    HAS_GPU,
    alignment,
    assert_alike,
    assert_within,
    expected_results,
    make_inputs,
    why_skip,
)
from planning import device, plan, problem

from tilegym_rmsnorm import rms_norm, rms_norm_forward
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

pytestmark = pytest.mark.usefixtures("poisoned_empty")

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

FACTS = machine_of(DEVICE).facts if HAS_GPU else device()
RUNS = 1000  # of each variant where it fills the GPU, on NaN


@pytest.mark.parametrize("n", [1, 64, 1000, 4096, 8192, 16400, 18432, 18448, 33001, 65536, 131072])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (BF16, None), (FP16, FP16), (FP32, FP32)])
def test_dx_alone(dtype, weight_dtype, n):
    from tilegym_rmsnorm.backends.cutile import launch

    for m, runs in ((1, 20), (33, 20), (min(4099, 2**24 // n), RUNS)):
        inputs = make_inputs(m, n, dtype, weight_dtype)
        x, dy, weight, eps, *_ = inputs
        _, rstd = rms_norm_forward(x, weight, eps, backend="cutile")
        spec = Spec(n, eps, 0.0, "once")
        tensors = (x, dy, weight, rstd, None)
        run = functools.partial(launch.rms_norm_backward, spec, tensors, Wanted(x.dtype))
        assert_alike(expected_results(inputs), ("dx",), lambda run=run: run()[:1], runs)


@pytest.mark.parametrize("n", [64, 1000, 4096, 18432, 20000, 81920])
def test_one_partial_row_per_row(n):
    from tilegym_rmsnorm.backends.cutile.host import norm

    inputs = make_inputs(min(1003, 2**25 // n), n, BF16, FP32)
    x, dy, weight, eps, *_ = inputs
    _, rstd = rms_norm_forward(x, weight, eps, backend="cutile")
    asked = problem("backward", n, x.dtype, size_class(len(x), n), weight.dtype, FACTS, partials="own")
    backward = norm.Backward(machine_of(DEVICE), norm.plan_for(asked))
    run = functools.partial(plain_calls.backward, backward, x, dy, weight, rstd, 0.0)
    assert_alike(expected_results(inputs), ("dx", "dw"), run, RUNS)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 64), (33, 1), (128, 64), (4096, 64), (33, 4096)])
def test_the_compile_tests_compile_what_launches_do(m, n, monkeypatch):
    """Extents of 1 are compiled in: of single rows and columns, and of dw_partial where P is 1."""
    import cuda.tile as ct
    from compiling import CompilingMachine

    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    symbols, compile_kernel = set(), ct.kernel._compile

    def spied(self, signature, *args, **kwargs):
        symbols.add(signature.with_mangled_symbol(self._pyfunc.__name__).symbol)
        return compile_kernel(self, signature, *args, **kwargs)

    monkeypatch.setattr(ct.kernel, "_compile", spied)
    machine.compiled.cache_clear()  # for kernels that nothing has been compiled of
    inputs, kind = make_inputs(m, n, BF16, FP32), (n, BF16, size_class(m, n), FP32)
    first = {op: norm.plan_for(problem(op, *kind, FACTS)).first for op in ("forward", "backward")}

    def run(on, x, dy, weight):
        forward, backward = (plan(variant, op, *kind, on.facts) for op, variant in first.items())
        y, rstd = plain_calls.forward(norm.Forward(on, forward), x, weight, inputs.eps, 0.0)
        dx, dw = plain_calls.backward(norm.Backward(on, backward), x, dy, weight, rstd, 0.0)
        return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}

    assert_within(expected_results(inputs), **run(machine_of(DEVICE), inputs.x, inputs.dy, inputs.weight))
    meta = CompilingMachine(FACTS.architecture, compiles=False, sm_count=FACTS.sm_count)
    run(meta, *(each.to("meta") for each in (inputs.x, inputs.dy, inputs.weight)))
    assert symbols == set().union(*meta.symbols.values())


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [64, 1024, 3104, 5120, 40000, 65536])
def test_batch_sizes_eps_and_offsets_compile_nothing_new(n, weight_dtype, compilations):
    """One compilation of each kernel for each class of M x N, M and P, whatever their values, eps and offset."""
    from tilegym_rmsnorm.backends.cutile.host import norm

    def train(m: int, eps: float, offset: float) -> tuple[str, str, str]:
        size = size_class(m, n)
        sizes = norm.plan_for(problem("backward", n, BF16, size, weight_dtype, FACTS)).sizes(m)
        x = torch.randn(m, n, device=DEVICE, dtype=BF16, requires_grad=True)
        weight = torch.ones(n, device=DEVICE, dtype=weight_dtype, requires_grad=True)
        rms_norm(x, (n,), weight, eps, offset=offset, backend="cutile").sum().backward()
        return size, alignment(m), alignment(sizes.partial_rows)

    classes = {train(m, 1e-6, 0.0) for m in (1, 2, 3, 16, 100, 128, 999, 1000, 4096, 5000, 16384)}
    counts = Counter(compilations)
    assert len(counts) >= 3, f"expected a forward, a backward and a sum, got {counts}"
    for name, count in counts.items():
        own = {"f": {(size, m) for size, m, _ in classes}, "s": {p for *_, p in classes}}.get(
            name[0], classes
        )
        assert count <= len(own), f"{name}: {count} compilations for {own}"

    compilations.clear()
    for m in (1, 2, 3, 16, 48, 100, 128, 999, 1001, 4112, 16400, 33333):
        for eps, offset in ((1e-5, 0.0), (0.25, 1.0)):
            seen = train(m, eps, offset) in classes
            assert not (seen and compilations), f"M = {m}: {compilations}"
            compilations.clear()


def test_memory_from_the_machine_is_poisoned():
    """Poisoning torch.empty alone would leave these tests blind."""
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    assert machine_of(DEVICE).empty((3, 5), BF16).isnan().all()
