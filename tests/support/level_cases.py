# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Calls of a backend under levels of reproducibility: of rows alone, in batches, and with rows of zeros behind them."""

import pytest
import torch
import variants
from helpers import BF16, FP16, FP32, every_config
from variants import Variant

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.ops.norm.spec import Wanted
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE

MOST = 257
LENGTHS = (1, 2, 255, 256)
OF_ANY_GPU = BATCH | DEVICE
SM_COUNTS = (3, 1, 7, 148)
HEADS = (1, MOST, 2, 64)
FORMS = {
    "plain": Variant(BF16),
    "float32": Variant(FP32, weight="none", layout="offset"),
    "residual": Variant(BF16, residual_dtype=BF16, layout="slices"),
    "all but heads": Variant(
        FP16,
        residual_dtype=FP32,
        residual_out_dtype=BF16,
        alpha=-0.5,
        bias_dtype=FP32,
        casting="llama",
        out_dtype=FP32,
        layout="gaps",
    ),
    "heads in place": Variant(BF16, HEADS, bias_dtype=BF16, layout="mixed", residual_dtype=BF16),
    "weights of heads": Variant(BF16, HEADS, "heads", BF16, offset=1.0, bias_dtype=BF16, layout="heads"),
}
WITH_WEIGHT = [form for form, variant in FORMS.items() if variant.weight != "none"]


def variant_of(form, n, rows=None):
    """Without --every-config fewer of wide rows, which have a program each."""
    variant, rows = FORMS[form], rows or (MOST if n <= 1024 or every_config else 16)
    return variant._replace(size=(1, rows, 2, n) if len(variant.size) == 4 else (rows, n))


def run(variant, inputs, level, launch, of_forward=None, of_backward=None, is_frozen=False):
    """All results of the functions of a backend, and residual_out; by default those of its module `launch`. is_frozen:
    no gradient of the weight is wanted."""
    x, weight, bias, residual, dy, d_residual_out = inputs
    spec = variants.spec_of(variant)._replace(reproducible=level)
    y, rstd, residual_out = (of_forward or launch.rms_norm_forward)(spec, (x, weight, bias, residual))
    normalized, wanted = x if residual is None else residual_out, variants.wanted_of(variant)
    wanted = wanted._replace(dw=None) if is_frozen else wanted
    tensors = normalized, dy, weight, rstd, d_residual_out
    found = (of_backward or launch.rms_norm_backward)(spec, tensors, wanted)
    assert [each is None for each in found] == [each is None for each in wanted]
    return {"y": y, "rstd": rstd.view(x.shape[:-1]), "residual_out": residual_out} | {
        name: each
        for name, each, dtype in zip(Wanted._fields, found, wanted, strict=True)
        if dtype is not None
    }


def rows_of(inputs, rows):
    """The inputs of some rows, or tokens."""
    part = (slice(None), rows) if inputs.x.ndim == 4 else rows
    names = "x", "residual", "dy", "d_residual_out"
    found = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{name: None if each is None else each[part] for name, each in found.items()})


def assert_a_row_is_alike(run_of, inputs):
    """A row in batches of any length, first, last or between, and in one that is laid out packed."""
    results = run_of(inputs)
    packed = {name: each.contiguous() for name, each in inputs._asdict().items() if each is not None}
    for name, each in run_of(inputs._replace(**packed)).items():
        assert each is None or torch.equal(each, results[name]), name
    axis = 1 if inputs.x.ndim == 4 else 0
    most = inputs.x.shape[axis]
    row = most // 2
    for length in (*(each for each in LENGTHS if each < most), most - 1):
        last = max(0, row - length + 1)
        for start in {start for start in (row, last, (row + last) // 2) if start + length <= most}:
            found = run_of(rows_of(inputs, slice(start, start + length)))
            for name in ("y", "rstd", "residual_out", "dx", "d_residual"):
                if results.get(name) is not None:
                    one = found[name].narrow(axis, row - start, 1)
                    assert torch.equal(one, results[name].narrow(axis, row, 1)), (name, length, start)


def assert_right(run_of, variant):
    inputs = variants.make(variant)
    results = run_of(inputs)
    residual_out = results.pop("residual_out")
    for name in ("y", "dx"):
        each = results[name]
        assert each.shape == inputs.x.shape and each.is_contiguous() and not each._is_view(), name
    results["rstd"] = results["rstd"].flatten()
    variants.check(variant, inputs, residual_out, **results)


def assert_sums_are_alike(sums_of, set_sm_count, more):
    """sums_of(count): sums over rows, with `count` rows of zeros behind them."""
    found = []
    for sm_count in SM_COUNTS:
        set_sm_count(sm_count)
        found.append(bits(sums_of(0)))
    found += [bits(sums_of(count)) for count in more]
    for sums in found[1:]:
        for one, other in zip(found[0], sums, strict=True):
            assert one is None or torch.equal(one, other)


def assert_a_margin_is_refused(*calls):
    with settings.use_sm_margin(1):
        for refused in calls:
            message = r'sm_margin: expected 0 with reproducible\("device"\), .* got 1'
            with pytest.raises(ValueError, match=message):
                refused()


def assert_a_frozen_weight_changes_nothing(run_of, inputs):
    """run_of(inputs, is_frozen=...): each gradient but dw has the same bits."""
    expected, found = run_of(inputs), run_of(inputs, is_frozen=True)
    assert expected.keys() - found.keys() == {"dw"}
    for name, each in found.items():
        assert each is None or torch.equal(each, expected[name]), name


def pairs(forms, widths):
    """Without --every-config each form has a few widths, in turn."""
    return [
        (form, n)
        for place, form in enumerate(forms)
        for number, n in enumerate(widths)
        if every_config or (place + number) % 4 == 0
    ]


def behind(inputs, count):
    """Append rows whose dy is zero."""
    axis = 1 if inputs.x.ndim == 4 else 0

    def longer(name, each):
        if each is None or name in ("weight", "bias"):
            return each
        more = each.narrow(axis, 0, 1).repeat_interleave(count, axis)
        return torch.cat((each, torch.zeros_like(more) if name == "dy" else more), axis)

    return inputs._replace(**{name: longer(name, each) for name, each in inputs._asdict().items()})


def bits(sums):
    return [
        None if each is None else each.view(torch.int16 if each.itemsize == 2 else torch.int32)
        for each in sums
    ]
