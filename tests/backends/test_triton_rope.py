# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": qk_norm_rope, in all forms that contract.py knows, against the formula in float64.

Each case runs with the tiles that are selected, and with small ones: then each program of the backward walks over
several. Without --every-config one form of a case has the one kind of tiles, and the other form the other. Without a
GPU the kernels run in Triton's interpreter.
"""

import itertools
import math

import numpy
import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU, in_turn, why_skip
from rope_cases import (
    CASES,
    WIDTHS,
    RopeCall,
    RopeCase,
    assert_xhat_is_rounded,
    cases_of_widths,
    check_backward,
    check_forward,
    make,
)
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.backends.registry import get_available_backends_for_op
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch

pytestmark = [
    pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
    pytest.mark.usefixtures("poisoned_empty"),
]
SMALL_TILE = 512  # elements
Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def run(call: RopeCall, **changes) -> Results:
    """Outputs and gradients. changes: of the spec."""
    from tilegym_rmsnorm.backends.triton import launch

    spec = call.spec._replace(**changes)
    before = [None if t is None else t.clone() for t in call.backward_tensors]
    outputs = launch.qk_norm_rope_forward(spec, call.tensors)
    gradients = launch.qk_norm_rope_backward(spec, call.backward_tensors, call.wanted)
    for tensor, old in zip(call.backward_tensors, before, strict=True):
        assert tensor is None or torch.equal(tensor, old), "an input is overwritten"
    return outputs, gradients


def check(call: RopeCall, results: Results) -> None:
    check_forward(call, *results[0])
    check_backward(call, *results[1])


@pytest.fixture(params=["selected", "small"])
def tiles(request, monkeypatch):
    from tilegym_rmsnorm.backends.triton import config

    if request.param == "small":
        monkeypatch.setattr(config, "FORWARD_TILE", SMALL_TILE)
        monkeypatch.setattr(config, "BACKWARD_TILE", SMALL_TILE)
    return request.param


TILES = ["selected", "small"]


@pytest.mark.parametrize(
    ("name", "interleaved", "tiles"), in_turn(CASES, [False, True], TILES, of=2), indirect=["tiles"]
)
def test_cases(name, interleaved, tiles):
    call = make(CASES[name]._replace(interleaved=interleaved, rotary_dim=32 if interleaved else 64), DEVICE)
    check(call, run(call))


@pytest.mark.parametrize(
    ("widths", "interleaved", "tiles"), in_turn(WIDTHS, [False, True], TILES, of=2), indirect=["tiles"]
)
def test_widths(widths, interleaved, tiles):
    """Each width and form has one kind of tiles, in turn, without --every-config."""
    n, rotary_dim = widths
    for case in cases_of_widths(n, rotary_dim, interleaved):
        many = sum(case.heads) >= 40  # which are several tiles of every length
        call = make(case if many else case._replace(length=9), DEVICE)
        check(call, run(call))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_outside_of_the_table(dtype, interleaved):
    case = RopeCase(FP32, 2, 6, (3, 2), 48, 32, interleaved, positions="each", position_dtype=dtype)
    call = make(case, DEVICE)
    call.tensors[6][0, :2] = torch.tensor([-1, len(call.tensors[4])])
    call.tensors[6][1, 2] = torch.iinfo(dtype).max
    check(call, run(call))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_same_bits_twice(interleaved, tiles):
    call = make(CASES["all"]._replace(n=80, interleaved=interleaved), DEVICE)
    for results in zip(run(call), run(call), strict=True):
        assert all(map(torch.equal, *results))


ROUNDINGS = tuple(itertools.product(("once", "llama"), ("end", "norm", "each")))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_casting_and_rounding_is_its_own(dtype, interleaved):
    """Tolerances alone let one pass as another. Not bit by bit: another rstd may turn a rounding over."""
    from tilegym_rmsnorm.backends.triton import launch

    case = RopeCase(dtype, 2, 9, (4, 2), 128, 96, interleaved, table_dtype=dtype, weight_dtype=FP32)
    call = make(case, DEVICE)
    specs = {each: call.spec._replace(casting=each[0], rope_rounding=each[1]) for each in ROUNDINGS}
    references = {each: rope_forward_torch(call.tensors, spec) for each, spec in specs.items()}
    for each, spec in specs.items():
        for index, y in enumerate(launch.qk_norm_rope_forward(spec, call.tensors)):
            shares = {
                other: (y == reference[index]).float().mean().item()
                for other, reference in references.items()
            }
            assert shares.pop(each) > 0.995 and max(shares.values()) < 0.9, (each, shares)


@pytest.mark.parametrize("rounding", ["end", "norm", "each"])
def test_rounded_products_are_not_contracted(rounding, monkeypatch):
    """Contraction drops a rounding on GPUs (gpu/test_gpu_rope.py); Triton's interpreter has none."""
    from tilegym_rmsnorm.backends.triton import rope

    seen = []

    class Kernel(dict):
        arg_names = ()

    kernel = Kernel({(2,): lambda **options: seen.append(options)})
    monkeypatch.setattr(rope, "rope", kernel)
    q, table = torch.ones(1, 1, 1, 16, device=DEVICE, dtype=BF16), torch.ones(1, 16, device=DEVICE)
    qk_norm_rope(q, q.clone(), None, None, table, table.clone(), rope_rounding=rounding, backend="triton")
    assert [each["enable_fp_fusion"] for each in seen] == [rounding != "each"]


def test_llama_rounds_xhat_in_the_gradients_of_weights():
    call = make(RopeCase(BF16, 2, 9, (4, 2), 128, 128, weight_dtype=FP32, casting="llama"), DEVICE)
    assert_xhat_is_rounded(call, *run(call)[1][2:])


MISTAKES = {
    "another form": lambda call: call._replace(spec=call.spec._replace(interleaved=True)),
    "sin of the other sign": lambda call: _with(call, 5, -call.tensors[5]),
    "cos and sin swapped": lambda call: _with(call, 4, call.tensors[5]),
    "k's weight for q": lambda call: _with(call, 2, call.tensors[3]),
    "positions one off": lambda call: _with(call, 6, call.tensors[6].roll(1, 1)),
    "another offset": lambda call: call._replace(spec=call.spec._replace(offset=1e-3)),
    "another eps": lambda call: call._replace(spec=call.spec._replace(eps=2e-3)),
    "heads of another order": lambda call: _with(call, 0, call.tensors[0].flip(2)),
}


def _with(call: RopeCall, index: int, tensor: Tensor) -> RopeCall:
    tensors = list(call.tensors)
    tensors[index] = tensor
    return call._replace(tensors=tuple(tensors))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake):
    call = make(RopeCase(heads=(3, 2), positions="each"), DEVICE)
    results = run(call)
    check(call, results)
    for checked, part in ((check_forward, results[0]), (check_backward, results[1])):
        with pytest.raises(AssertionError, match="beyond the tolerance"):
            checked(MISTAKES[mistake](call), *part)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_element_beside_a_row_is_read_or_written(interleaved, tiles):
    """Memory around arrays is NaN (see `make`); here the results' memory is watched."""
    empty, taken = torch.empty, []

    def guarded(shape, **kwargs):
        count = math.prod(shape)
        storage = empty((count + 128,), **kwargs).fill_(math.nan)
        storage[:64] = storage[64 + count :] = 77
        taken.append((storage, count))
        return storage[64 : 64 + count].view(shape)

    call = make(RopeCase(BF16, 2, 7, (3, 1), 20, 12, interleaved, ("heads", "vector")), DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        results = run(call)
    check(call, results)
    assert len(taken) == 8, "two outputs, four gradients, two partial sums"
    for storage, count in taken:
        assert (storage[:64] == 77).all() and (storage[64 + count :] == 77).all()


FAR = RopeCase(FP16, 2, 3, (2, 2), 8, 8, table_dtype=FP16, positions="each")


@pytest.mark.much_memory
def test_strides_beyond_32_bits():
    """q and dq_out stride so by the batch, dk_out by heads; a row of cos begins beyond element 2^31."""
    far = 2**31 + 8
    call = make(FAR, DEVICE)
    q, k, *weights, cos, sin, positions = call.tensors

    def moved(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        if HAS_GPU:
            storage = torch.zeros(far + 1024, dtype=FP16, device=DEVICE)
        else:
            storage = torch.from_numpy(numpy.zeros(far + 1024, numpy.float16))  # no memory until written
        return storage.as_strided(tensor.shape, strides).copy_(tensor)

    cos = moved(cos[:2], (far, 1))
    tensors = moved(q, (far, 64, 16, 1)), k, *weights, cos, sin[:2], positions % 2
    dys = moved(call.dys[0], (far, 8, 32, 1)), moved(call.dys[1], (64, 8, far, 1))
    call = call._replace(tensors=tensors, dys=dys)
    check(call, run(call))


@pytest.mark.much_memory
def test_offsets_of_rows_beyond_32_bits_by_positions_of_32():
    """A position and a stride of a row of cos that 32 bits hold, but not their product."""
    far = 2**30
    call = make(FAR._replace(position_dtype=torch.int32), DEVICE)
    *heads, cos, sin, positions = call.tensors
    storage = torch.from_numpy(numpy.zeros(3 * far + 8, numpy.float16))  # no memory until it is written
    storage = storage.to(DEVICE) if HAS_GPU else storage
    cos = storage.as_strided((4, 8), (far, 1)).copy_(cos[:4])
    call = call._replace(tensors=(*heads, cos, sin[:4], positions % 2 + 2))
    check(call, run(call))


def test_the_registry_has_both_ops():
    for op in ("qk_norm_rope_forward", "qk_norm_rope_backward"):
        assert "triton" in get_available_backends_for_op(op)
