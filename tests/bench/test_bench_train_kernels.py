# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The device's time of a step by kind of kernel: whose kernel it is by its name, and how long it ran by itself."""

import re
import sys

import pytest
import torch
from helpers import HAS_GPU
from training_steps import sizes_of, way_and_step

from bench.train import kernels
from bench.train.kernels import COMMUNICATION, CUTILE, KINDS, OURS, Kernel, alone, by_kind, exposed
from tilegym_rmsnorm import set_backend

TILES = "Kt2_A2bf16_1v8l0_2t1_3i16_p16_A2f32_1v4l0_2t1_3i16_p16_i4096"
SDPA = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0"
)
NATIVE = "void at::native::"
# Names as a profiler gave them
NAMES = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
    "nvjet_sm90_tst_128x128_64x6_1x2_h_bz_splitK_NTT": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false": "matmul",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(T1)": "matmul",
    SDPA: "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>": "attention",
    f"{NATIVE}(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float": "other norms",
    f"{NATIVE}(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int": "other norms",
    f"{NATIVE}(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32": "other norms",
    "_rms_norm_forward_kernel": "other norms",
    "_block_rms_norm_backward_kernel": "other norms",
    f"backward_tiles_{TILES}": OURS,
    "forward_rope_Kt2_T3A4bf16_1v8l0_2t1_3i16_p16": OURS,
    f"backward_unaligned_team_{TILES}": OURS,
    "sum_partials_Kt2_A2f32_1v4l0_2t1_3i16_p16": OURS,
    "backward_dx": OURS,
    "rope_backward": OURS,
    "triton_per_fused__fused_rms_norm_backward_0": "Inductor",
    "triton_poi_fused_add_all_gather_into_tensor_3": "Inductor",
    "triton_red_fused__fused_rms_norm__to_copy_bmm_cat_cos_0": "Inductor",
    "Memset (Device)": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array": "other",
    f"{NATIVE}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(ano": "other",
    f"{NATIVE}(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*, c10::B": "other",
    # Others' kernels, and PyTorch's, whose names begin as ours do
    "forward_kernel": "other",
    "backward_tiles_of_somebody": "other",
    "forward": "other",
    "gradient": "other",
}


@pytest.fixture(scope="module")
def ours():
    return kernels.our_names()


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=range(len(NAMES)))
def test_the_kind_of_a_kernel(name, kind, ours):
    if "_Kt" in name:
        pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    assert kernels.kind_of(kernels.short_name(name), ours) == kind


def test_arguments_are_cut_from_cutiles_names_alone():
    assert kernels.short_name(f"backward_tiles_{TILES}") == "backward_tiles"
    assert kernels.short_name(SDPA) == SDPA and kernels.short_name("a_Kitten_1") == "a_Kitten_1"
    assert CUTILE.search(f"x_{TILES}")


def test_cutiles_kernels_are_ours(ours):
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile.kernels import KERNELS

    assert KERNELS.keys() <= ours and {"forward_rows", "backward_team", "sum_partials"} <= KERNELS.keys()


def test_names_of_tritons_kernels_are_those_that_it_launches(monkeypatch, ours):
    """A kernel there runs by the name of its argument KERNEL; helpers' names, such as "zeros", may be others'
    kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tilegym_rmsnorm.backends.triton import backward, forward, host, launch, reduce, rope

    named, modules = set(), (forward, backward, rope, reduce)
    for module in modules:
        source = open(module.__file__, encoding="utf-8").read()
        named |= set(re.findall(r'KERNEL == "(\w+)"', source))
        for options, name in re.findall(r"^@triton\.jit\(\n?(.*)\n?\)\ndef (\w+)\(", source, re.MULTILINE):
            if "repr=kernel_name" not in options:
                named.add(name)
    assert named == set(kernels.TRITON) <= ours
    if HAS_GPU:
        pytest.skip("the model is on a CPU, where the interpreter runs kernels")
    launched, run = set(), host.run

    def noting(device, *launches):
        launched.update(given.get("KERNEL", kernel.fn.__name__) for kernel, _, given, _ in launches)
        run(device, *launches)

    assert launch.host_norm.host is launch.host_rope.host is host
    monkeypatch.setattr(host, "run", noting)
    set_backend("triton")
    way_and_step("decoder-2048-qk", "fused", torch.bfloat16, sizes_of("decoder-2048-qk"))
    assert launched == {"forward_rows", "backward_dx", "rope_forward", "rope_backward", "sum_partials"}


def test_without_cuda_tile_there_are_tritons_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilegym_rmsnorm.backends.cutile.kernels", None)
    assert kernels.our_names() == set(kernels.TRITON)


def test_a_kernel_counts_from_where_the_one_before_ends():
    """One that is launched programmatically begins early, and waits; one of another stream runs beside it."""
    first, early, beside, inside, waits, later = (
        Kernel("first", 0, 10, 7),
        Kernel("early", 6, 15, 7),
        Kernel("beside", 6, 15, 8),
        Kernel("inside", 7, 14, 7),
        Kernel("waits", 13, 18, 7),
        Kernel("later", 20, 21, 7),
    )
    found = alone([later, inside, waits, beside, early, first])
    assert dict(found) == {first: 10, early: 5, beside: 9, inside: 0, waits: 3, later: 1}


def test_exposed_communication_is_what_runs_beside_nothing():
    kinds = {"nccl": COMMUNICATION, "work": "matmul", "copy": "copies"}

    def of(*times):
        return exposed([Kernel(*each, 0) for each in times], kinds)

    assert of(("nccl", 0, 10), ("work", 4, 6)) == 8
    assert of(("work", 0, 10), ("nccl", 4, 6)) == 0
    assert of(("nccl", 0, 10), ("nccl", 5, 15), ("work", 12, 20)) == 12, "two at once count once"
    assert of(("nccl", 0, 4), ("work", 4, 6), ("nccl", 6, 9)) == 7, "neighbours do not overlap"
    assert of(("nccl", 0, 10), ("copy", 1, 2), ("work", 2, 3)) == 8
    assert of(("work", 0, 3), ("nccl", 0, 3)) == of(("work", 0, 3)) == 0
    assert of(("nccl", 2, 5), ("work", 100, 101)) == 3


def test_a_step_is_summed_by_kind():
    def step(begin):
        yield Kernel("nvjet_a", begin, begin + 3000, 7)
        yield Kernel("forward_rows", begin + 3000, begin + 4000, 7)
        yield Kernel("forward_rows", begin + 3900, begin + 4500, 7)
        yield Kernel("ncclDevKernel_AllGather", begin + 4000, begin + 6000, 9)
        yield Kernel("own", begin + 7000, begin + 7250, 7)

    found = by_kind([*step(0), *step(10_000)], frozenset(["forward_rows"]), 2)
    assert found["device_ms"] == {"matmul": 3.0, OURS: 1.5, COMMUNICATION: 2.0, "other": 0.25}
    assert list(found["device_ms"]) == [kind for kind in KINDS if kind in found["device_ms"]]
    assert found["exposed_ms"] == 1.5 and found["norm_kernels"] == {"forward_rows": 2.0}
    assert found["kernels"][:2] == [
        ["nvjet_a", "matmul", 1, 3.0],
        ["ncclDevKernel_AllGather", COMMUNICATION, 1, 2.0],
    ]
    assert found["kernels"][2] == ["forward_rows", OURS, 2, 1.5]


def test_without_communication_none_is_exposed():
    assert by_kind([Kernel("nvjet", 0, 1, 7)], frozenset(), 1)["exposed_ms"] is None


def test_the_longest_kernels_are_kept():
    many = [
        Kernel(f"k{number:03}" + "x" * 200, number * 1000, number * 1000 + number, 7) for number in range(50)
    ]
    found = by_kind(many, frozenset(), 1)["kernels"]
    assert len(found) == 30 and found[0][0].startswith("k049") and all(len(each[0]) == 120 for each in found)
