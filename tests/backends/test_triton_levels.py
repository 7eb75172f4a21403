# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton" under levels (reproducibility.py): the bits of a row in any batch, of dw on any GPU, and vLLM's.

Without a GPU in Triton's interpreter, which adds by the shapes of tiles alone: what else a compiler goes by is in
compiled/test_triton_compile_levels.py."""

import level_cases
import pytest
import rope_cases
import torch
import variants
from helpers import BF16, DEVICE, FP16, FP32, every_config, why_skip
from level_cases import (
    FORMS,
    LENGTHS,
    MOST,
    OF_ANY_GPU,
    WITH_WEIGHT,
    assert_a_frozen_weight_changes_nothing,
    assert_a_margin_is_refused,
    assert_a_row_is_alike,
    assert_right,
    assert_sums_are_alike,
    behind,
    pairs,
    variant_of,
)
from rope_cases import RopeCase
from variants import Variant

from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.ops.norm.spec import Wanted
from tilegym_rmsnorm.ops.rope.spec import RopeWanted
from tilegym_rmsnorm.reproducibility import BATCH, LEVELS, VLLM

pytestmark = [
    pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
    pytest.mark.usefixtures("poisoned_empty"),
]
WIDTHS = (1, 64, 100, 640, 2048, 4096, 5120, 8192, 12288, 16384, 18432)  # every kind of tile of config.py


def run(variant, inputs, level, *around, **options):
    from tilegym_rmsnorm.backends.triton import launch

    return level_cases.run(variant, inputs, level, launch, *around, **options)


@pytest.mark.parametrize(("form", "n"), pairs(FORMS, WIDTHS))
def test_a_row_does_not_depend_on_its_batch(form, n):
    variant = variant_of(form, n)
    assert_a_row_is_alike(lambda part: run(variant, part, BATCH), variants.make(variant))


@pytest.mark.parametrize(("form", "n"), pairs(WITH_WEIGHT, WIDTHS))
def test_a_frozen_weight_has_the_dx_of_a_trained_one(form, n):
    variant = variant_of(form, n, 12)
    assert_a_frozen_weight_changes_nothing(
        lambda inputs, **options: run(variant, inputs, BATCH, **options), variants.make(variant)
    )


@pytest.mark.parametrize("form", FORMS)
def test_results_are_right(form):
    variant = variant_of(form, 640, 5)
    assert_right(lambda inputs: run(variant, inputs, OF_ANY_GPU), variant)


@pytest.mark.parametrize("form", ["plain", "all but heads", "weights of heads"])
def test_around_a_kernel_too(form):
    """A simpler kernel between PyTorch's operations, as cutile's wide rows have it."""
    from tilegym_rmsnorm.backends.triton import launch

    def run_around(inputs):
        return run(
            variant,
            inputs,
            BATCH,
            lambda *call: around_kernels.forward(launch.rms_norm_forward, *call),
            lambda *call: around_kernels.backward(launch.rms_norm_backward, *call),
        )

    variant = variant_of(form, 100)
    assert_a_row_is_alike(run_around, variants.make(variant))


@pytest.mark.parametrize("form", ["all but heads", "weights of heads"])
def test_sums_of_pytorch_are_refused_on_any_gpu(form):
    variant = variant_of(form, 8, 3)
    inputs = variants.make(variant)
    tensors = inputs.x, inputs.dy, inputs.weight, torch.ones(inputs.x[..., 0].numel(), device=DEVICE), None
    spec = variants.spec_of(variant)._replace(reproducible=OF_ANY_GPU)
    with pytest.raises(
        ValueError, match='expected at most "batch" for gradients of .* with 8 columns, got "device"'
    ):
        around_kernels.backward(None, spec, tensors, variants.wanted_of(variant))


@pytest.fixture(params=[3, None] if every_config else [3], ids=str)
def fixed_sms(request, monkeypatch):
    """Of few SMs walks are long."""
    from tilegym_rmsnorm.backends.triton import config, config_rope

    config_rope._walks_of_many.cache_clear()
    if request.param:
        monkeypatch.setattr(config, "FIXED_SMS", request.param)
    yield
    config_rope._walks_of_many.cache_clear()


@pytest.fixture
def set_sm_count(monkeypatch):
    from tilegym_rmsnorm.backends.triton import host

    return lambda sm_count: monkeypatch.setattr(host, "sm_count", lambda device: sm_count)


@pytest.mark.parametrize(("form", "n"), pairs(FORMS, (64, 640, 8192, 16384, 18432)))
def test_sums_do_not_depend_on_the_gpu_or_on_padding(form, n, fixed_sms, set_sm_count):
    variant = variant_of(form, n, 70 if n <= 640 else 7)
    inputs = variants.make(variant)

    def sums(count):
        results = run(variant, behind(inputs, count), OF_ANY_GPU)
        return [results.get("dw"), results.get("db")]

    assert_sums_are_alike(sums, set_sm_count, (1, 5, 130 if n <= 640 else 9))


def test_without_the_level_they_do(set_sm_count):
    """So the test above says something."""
    variant = variant_of("plain", 640, 250)
    inputs = variants.make(variant)

    def sums(count):
        return [run(variant, behind(inputs, count), BATCH)["dw"]]

    with pytest.raises(AssertionError):
        assert_sums_are_alike(sums, set_sm_count, ())


ROPES = {
    "plain": RopeCase(BF16, 1, MOST, (3, 1), 16, 16, weight_dtype=FP32, layout="packed"),
    "interleaved": RopeCase(FP32, 1, MOST, (2, 2), 20, 12, True, ("heads", "vector"), layout="offset"),
    "positions": RopeCase(BF16, 1, MOST, (5, 0), 16, 8, tables="half", positions="one", table_layout="gaps"),
    "wide": RopeCase(BF16, 1, MOST, (2, 1), 256, 64, dy_layout="gaps"),
}


def run_rope(call, level, wanted=None):
    from tilegym_rmsnorm.backends.triton import launch

    wanted = call.wanted if wanted is None else wanted
    spec = call.spec._replace(reproducible=level)
    outputs = launch.qk_norm_rope_forward(spec, call.tensors)
    return (*outputs, *launch.qk_norm_rope_backward(spec, call.backward_tensors, wanted))


def tokens_of(call, part):
    """The call of some of its tokens."""
    *rows, q_weight, k_weight, cos, sin, positions = call.tensors
    rows, dys = ([None if each is None else each[:, part] for each in found] for found in (rows, call.dys))
    if positions is None:
        cos, sin = cos[part], sin[part]
    else:
        positions = positions[:, part]
    return call._replace(tensors=(*rows, q_weight, k_weight, cos, sin, positions), dys=tuple(dys))


@pytest.mark.parametrize("name", ROPES)
def test_a_head_does_not_depend_on_its_batch(name):
    call = rope_cases.make(ROPES[name], DEVICE)
    expected, token = run_rope(call, BATCH), 128
    for length in LENGTHS:
        start = max(0, token - length // 2)
        found = run_rope(tokens_of(call, slice(start, start + length)), BATCH)
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert one is None or torch.equal(one[:, token - start], other[:, token]), length


@pytest.mark.parametrize("name", ROPES)
def test_frozen_weights_of_rope_have_the_kernel_of_trained_ones(name, monkeypatch):
    from tilegym_rmsnorm.backends.triton import host

    compiled, run = [], host.run

    def noting(device, first, *others):
        kernel, _, arguments, options = first
        facts = {
            key: None if each is None else "present" for key, each in arguments.items() if key.endswith("ptr")
        }
        compiled.append((kernel, facts, options))
        run(device, first, *others)

    monkeypatch.setattr(host, "run", noting)
    call = rope_cases.make(ROPES[name], DEVICE)
    trained, frozen = (run_rope(call, BATCH, wanted) for wanted in (None, RopeWanted()))
    assert compiled[:2] == compiled[2:]
    assert frozen[4:] == (None, None)
    for one, other in zip(trained[:4], frozen[:4], strict=True):
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("name", ROPES)
def test_sums_of_rope_do_not_depend_on_the_gpu_or_on_padding(name, fixed_sms, set_sm_count):
    whole = rope_cases.make(ROPES[name], DEVICE)
    tokens = 100
    padded = whole._replace(dys=tuple(None if each is None else each.clone() for each in whole.dys))
    for dy in padded.dys:
        if dy is not None:
            dy[:, tokens:] = 0

    def sums(count):
        return run_rope(tokens_of(padded, slice(0, tokens + count)), OF_ANY_GPU)[4:]

    rope_cases.check_backward(whole, *run_rope(whole, OF_ANY_GPU)[2:])
    assert_sums_are_alike(sums, set_sm_count, (1, 7, MOST - tokens))


def test_no_level_is_kept_on_amd_gpus(monkeypatch):
    """Why is in compiled/test_triton_keys.py."""
    from tilegym_rmsnorm.backends import registry, triton

    monkeypatch.setattr(torch.version, "hip", "7.1")
    for name, answer in (("interpreting", False), ("_gpu_unusable", None), ("_triton_unusable", None)):
        monkeypatch.setattr(triton, name, lambda *_, answer=answer: answer)
    for level in LEVELS.values():
        options = {"n": 64, "is_aligned": True, "level": level}
        request = registry.request_of(torch.device("cuda:0"), "once", None, BF16, BF16, **options)
        assert (triton.unusable(request) is None) == (level == 0)


def test_heads_that_no_kernel_holds():
    """The rotation is PyTorch's, and adds no row. rstd of the backward is the kernel's."""
    from tilegym_rmsnorm.backends.triton import config, launch

    n = config.BACKWARD_HELD + 2
    call = rope_cases.make(RopeCase(BF16, 1, 3, (1, 0), n, 8), DEVICE)
    spec = call.spec._replace(reproducible=BATCH)
    for run, tensors, wanted in (
        (launch.qk_norm_rope_forward, "tensors", ()),
        (launch.qk_norm_rope_backward, "backward_tensors", (call.wanted,)),
    ):
        (whole, *_), (alone, *_) = (
            run(spec, getattr(each, tensors), *wanted) for each in (call, tokens_of(call, slice(1, 2)))
        )
        assert torch.equal(whole[:, 1:2], alone)


def test_a_margin_beside_a_fixed_grid_is_refused_before_any_launch(monkeypatch):
    from tilegym_rmsnorm.backends.triton import host, launch

    monkeypatch.setattr(host, "run", lambda *_: pytest.fail("launched"))
    variant = variant_of("plain", 64, 3)
    x, weight, *_, dy, _ = variants.make(variant)
    spec = variants.spec_of(variant)._replace(reproducible=OF_ANY_GPU)
    tensors = x, dy, weight, torch.ones(3, device=DEVICE), None
    rope = rope_cases.make(RopeCase(), DEVICE)
    of_rope = rope.spec._replace(reproducible=OF_ANY_GPU)
    assert_a_margin_is_refused(
        lambda: launch.rms_norm_forward(spec, (x, weight, None, None)),
        lambda: launch.rms_norm_backward(spec, tensors, Wanted(BF16)),
        lambda: launch.qk_norm_rope_forward(of_rope, rope.tensors),
        lambda: launch.qk_norm_rope_backward(of_rope, rope.backward_tensors, rope.wanted),
    )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", [1, 100, 1024, 1032, 4096, 16500])
def test_vllms_bits(n, dtype):
    import vllm_kernel

    variant = Variant(dtype, (5, n), weight_dtype=dtype, eps=1e-5)
    inputs = variants.make(variant)
    results = run(variant, inputs, BATCH | VLLM)
    assert torch.equal(results["y"], vllm_kernel.rms_norm(inputs.x, inputs.weight, variant.eps))
    assert not results.pop("residual_out")
    variants.check(variant, inputs, **results)


@pytest.mark.parametrize("residual_out_dtype", [BF16, FP32])
@pytest.mark.parametrize("layout", ["contiguous", "mixed"])
def test_vllms_bits_of_a_rounded_sum(residual_out_dtype, layout):
    import vllm_kernel

    sums = {"residual_dtype": FP16, "residual_out_dtype": residual_out_dtype}
    variant = Variant(BF16, (2, 3, 4, 1500), layout=layout, out_dtype=residual_out_dtype, **sums)
    inputs = variants.make(variant)
    results = run(variant, inputs, BATCH | VLLM)
    residual_out = results.pop("residual_out")
    variants.check_residual_out(variant, inputs, residual_out)
    assert torch.equal(results["y"], vllm_kernel.rms_norm(residual_out, inputs.weight, variant.eps))
    results["rstd"] = results["rstd"].flatten()
    variants.check(variant, inputs, residual_out, **results)


def test_vllms_order_is_another_than_ours():
    """So the tests above say something."""
    variant = Variant(FP32, (7, 4096))
    inputs = variants.make(variant)
    ours, theirs = (run(variant, inputs, level)["rstd"] for level in (BATCH, BATCH | VLLM))
    assert not torch.equal(ours, theirs)


def test_without_a_weight_vllms_is_one():
    variant = Variant(BF16, (5, 100))
    inputs = variants.make(variant)
    ones = inputs._replace(weight=torch.ones(100, dtype=BF16, device=DEVICE))
    assert torch.equal(
        run(variant._replace(weight="none"), inputs._replace(weight=None), BATCH | VLLM)["y"],
        run(variant, ones, BATCH | VLLM)["y"],
    )


REFUSED = {
    'offset: expected 0.0 with reproducible(order="vllm"), got 1.0': Variant(offset=1.0),
    "casting: expected 'once' with reproducible(order=\"vllm\"), got 'llama'": Variant(BF16, casting="llama"),
    'bias: expected None with reproducible(order="vllm"), got (64,)': Variant(bias_dtype=FP32),
    'weight: expected (16,) with reproducible(order="vllm"), got (4, 16)': Variant(
        FP32, (2, 3, 4, 16), "heads"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_vllm_does_not_do_is_refused(message, monkeypatch):
    import re

    from tilegym_rmsnorm.backends.triton import host

    monkeypatch.setattr(host, "run", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=re.escape(message)):
        run(REFUSED[message], variants.make(REFUSED[message]), BATCH | VLLM)
    rope = rope_cases.make(RopeCase(), DEVICE)
    with pytest.raises(ValueError, match='expected another order than "vllm" for qk_norm_rope'):
        run_rope(rope, BATCH | VLLM)
