# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""By which keys Triton keeps kernels under levels (reproducibility.py): one for any number of rows, so that all of them
have one compiled kernel. Where rows lie is in test_triton_compile_levels.py."""

import importlib.util

import pytest
from helpers import BF16, FP32
from rope_cases import RopeCase

from tilegym_rmsnorm.backends.versions import package_version, parse_version
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE, VLLM

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HOPPER, MI300 = ("cuda", 90, 32), ("hip", "gfx942", 64)
WIDTHS = (1, 64, 100, 640, 4096, 8192, 12288, 18432)  # every kernel
ROWS = (1, 2, 3, 16, 255, 256, 257, 4096)
TOKENS = ((1, 1), (1, 2), (2, 1), (3, 5), (16, 16), (1, 257), (7, 255), (2, 4096))  # B and T
BASE = {"dtype": "bfloat16", "weight_dtype": "bfloat16", "reproducible": BATCH}
RESIDUAL = {"residual_dtype": "bfloat16", "residual_out_dtype": "bfloat16"}
FORMS = {
    "plain": {},
    "without a weight": {"weight_dtype": None, "dtype": "float32"},
    "llama": {"casting": "llama", "weight_dtype": "float32"},
    "residual": RESIDUAL,
    "alpha, bias": RESIDUAL | {"alpha": 0.5, "bias_dtype": "float32"},
    "added to dw": {"adds": True},
    "device": {"reproducible": BATCH | DEVICE},
    "vllm": {"reproducible": BATCH | VLLM},
    "vllm, residual": RESIDUAL | {"reproducible": BATCH | VLLM},
}
HEADS = {"heads": {}, "weights of heads": {"is_per_head": True, "bias_dtype": "float32"}}
ROPE = RopeCase(BF16, heads=(8, 2), n=128, rotary_dim=64, layout="packed")
ROPES = {
    "plain": {},
    "without k": {"heads": (5, 0), "dtype": FP32},
    "interleaved": {"interleaved": True, "n": 80, "rotary_dim": 20},
    "weights of heads": {"weight": ("heads", "vector"), "tables": "half", "n": 66, "rotary_dim": 34},
    "rows of each batch": {"has_rows_of_batch": True},
    "one row of positions": {"positions": "one"},
    "positions of each batch": {"positions": "each"},
}


def assert_one_key(found, names):
    assert {key.split()[0] for key in found[0]} == set(names)
    for keys in found[1:]:
        assert keys == found[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_number_of_rows_has_no_key_of_its_own(form, keys_by):
    for n in WIDTHS:
        found = keys_by(HOPPER, [BASE | FORMS[form] | {"N": n, "M": rows} for rows in ROWS])
        names = ["forward", "backward"] + ["sum_partials"] * (form != "without a weight")
        assert_one_key(found, names)


@pytest.mark.parametrize("form", HEADS)
def test_rows_of_heads_have_one_key(form, keys_by):
    """Of odd and even B and T."""
    for n in (64, 100, 4096, 12288):
        calls = [BASE | HEADS[form] | {"N": n, "heads": (*tokens, 8)} for tokens in TOKENS[:-1]]
        assert_one_key(keys_by(HOPPER, calls), ["forward", "backward", "sum_partials"])


@pytest.mark.parametrize("form", ROPES)
@pytest.mark.parametrize("level", [BATCH, BATCH | DEVICE])
def test_tokens_of_rope_have_one_key(form, level, keys_by):
    case = ROPE._replace(**ROPES[form])
    calls = [case._replace(batch=b, length=t)._asdict() | {"reproducible": level} for b, t in TOKENS]
    assert_one_key(keys_by(HOPPER, calls), ["rope", "sum_partials"])


@pytest.mark.parametrize(
    ("parameter", "calls"),
    [
        ("M", [BASE | {"N": 64, "M": rows} for rows in ROWS]),
        ("T", [BASE | HEADS["weights of heads"] | {"N": 64, "heads": (2, t, 8)} for t in (1, 3, 16)]),
        ("x_batch_stride", [BASE | HEADS["weights of heads"] | {"N": 4, "heads": (2, t, 3)} for t in (1, 4)]),
        *(
            (name, [ROPE._replace(batch=b, length=t) for b, t in TOKENS])
            for name in ("M", "T", "q_programs", "table_rows")
        ),
        ("q_batch_stride", [ROPE._replace(n=6, rotary_dim=4, heads=(3, 0), length=t) for t in (1, 8)]),
        ("table_batch_stride", [ROPE._replace(length=t, has_rows_of_batch=True) for t in (1, 3, 16)]),
    ],
)
def test_a_number_that_triton_compiles_for_would_have_keys_of_its_own(parameter, calls, keys_by):
    """So the tests above say something."""
    calls = [call if isinstance(call, dict) else call._asdict() | {"reproducible": BATCH} for call in calls]
    for specialized, is_one in (((), True), ((parameter,), False)):
        found = keys_by(HOPPER, calls, specialized)
        assert all(keys == found[0] for keys in found) == is_one


def test_without_a_level_calls_have_several(keys_by):
    """By where rows begin, and how far they lie apart."""
    call = BASE | {"N": 100, "reproducible": 0}
    found = keys_by(HOPPER, [call, call | {"begin": 1}, call | {"row_stride": 101}])
    assert len({tuple(keys) for keys in found}) == 3


def test_more_rows_than_32_bits_count_are_refused(keys_by):
    """Triton would compile another kernel for them."""
    call = BASE | {"N": 1, "M": 2**31 - 1}
    assert_one_key(
        keys_by(HOPPER, [call, call | {"M": 3}], device="meta"), ["forward", "backward", "sum_partials"]
    )
    without = call | {"reproducible": 0, "M": 2**31}
    longer, shorter = keys_by(HOPPER, [without, without | {"M": 3}], device="meta")
    assert longer != shorter
    with pytest.raises(AssertionError, match="reproducible: expected rows and strides of at most 2147483647"):
        keys_by(HOPPER, [call | {"M": 2**31}], device="meta")


@pytest.mark.skipif(
    parse_version(package_version("triton") or "3.7")[:2] < (3, 6), reason="Triton 3.5 has no such keys"
)
def test_of_an_amd_gpu_the_bytes_of_an_array_decide(keys_by):
    """So no level is kept there: backends/triton/__init__.py."""
    call = BASE | {"N": 4096, "dtype": "float32"}
    few, many = keys_by(MI300, [call | {"M": rows} for rows in (16, 2**20)], device="meta")
    assert few != many
