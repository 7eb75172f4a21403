# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten: its end, in other overrides and beside those of others."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from aten_cases import KEY, MARKS, fused, fused_backward, kernels, norm_of, overridden, taken
from helpers import DEVICE, FP64, HAS_GPU

from tilegym_rmsnorm.integrations import aten
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, TAKEN

pytestmark = MARKS


def test_for_good_until_undone():
    before, x = kernels(), norm_of(3, 16, requires_grad=False)
    override = overridden()
    F.rms_norm(x, (16,))
    assert kernels() != before and taken(override) == (1, 0)
    override.undo()
    assert kernels() == before
    F.rms_norm(x, (16,))
    override.undo()
    assert kernels() == before and taken(override) == (1, 0)
    with pytest.raises(RuntimeError, match="was undone"), override:
        pass


def test_an_error_in_the_block_undoes_it():
    before = kernels()
    with pytest.raises(KeyError), overridden():
        raise KeyError
    assert kernels() == before


def test_a_graph_made_afterwards_does_not_know_our_kernels():
    """PyTorch's tracers in Python remember which kernels an op has: of a CPU no backward, once ours is gone."""

    def gradient(columns):
        torch._dynamo.reset()
        x = norm_of(3, columns)
        options = {
            "backend": "aot_eager",
            "dynamic": False,
        }  # a width that Dynamo has seen change is a symbol
        torch.compile(lambda x: F.rms_norm(x, (columns,)).sin(), **options)(x).sum().backward()
        return x.grad

    for op in (fused, fused_backward):
        op._dispatch_cache.clear()  # of what other tests registered
    with overridden():
        gradient(16)
    for columns in (16, 0):
        assert gradient(columns).shape == (3, columns)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_overrides_in_each_other(order):
    """They end in any order; each counts from its own beginning to its own end."""
    before, x = kernels(), norm_of(3, 16, requires_grad=False)
    overrides, calls = [], 0
    for _ in range(3):
        overrides.append(overridden())
        F.rms_norm(x, (16,))
    seen = {0: 3, 1: 2, 2: 1}
    assert len(aten._patches[DEVICE.type]) == 1
    for ended, number in enumerate(order):
        F.rms_norm(x, (16,))
        calls += 1
        overrides[number].undo()
        assert taken(overrides[number]) == (seen[number] + calls, 0)
        assert (kernels() == before) == (ended == 2)


class Other:
    """Another library that overrides both ops, and hands on what it does not take, as torch._native does."""

    def __init__(self, takes: bool = False, ops=(ATEN_FORWARD, ATEN_BACKWARD)):
        self.takes, self.calls, self.below = takes, 0, {op: aten._kernel(op, KEY) for op in ops}
        self.library = torch.library.Library("aten", "IMPL", KEY)
        for op in ops:
            self.library.impl(op, self.function(op), KEY, with_keyset=True, allow_override=True)

    def function(self, op):
        def call(keyset, *arguments):
            self.calls += 1
            if self.takes:
                return torch.full((3, 16), 7.0, device=DEVICE), torch.ones(3, 1, device=DEVICE)
            return self.below[op].call_boxed(keyset, *arguments)

        return call

    def leave(self) -> None:
        self.library._destroy()


def test_above_another_library():
    """The other gets what is declined, and is there again afterwards, not ATen."""
    x = norm_of(3, 16, requires_grad=False)
    other = Other(takes=True)
    try:
        with overridden() as override:
            assert not (F.rms_norm(x, (16,)) == 7).any() and taken(override) == (1, 0) and other.calls == 0
            assert (F.rms_norm(x.double(), (16,)) == 7).all() and other.calls == 1
        assert (F.rms_norm(x, (16,)) == 7).all() and other.calls == 2
    finally:
        other.leave()


@pytest.mark.parametrize("ops", [(ATEN_FORWARD, ATEN_BACKWARD), (ATEN_FORWARD,)])
@pytest.mark.parametrize("ours_ends_first", [True, False])
def test_below_another_library(ours_ends_first, ops):
    """Calls that the other hands on are taken. Once undone, none is, though it still calls the kernel that it found."""
    x, before = norm_of(3, 16), kernels()
    theirs = F.rms_norm(x, (16,))
    override = overridden()
    other = Other(ops=ops)
    try:
        F.rms_norm(x, (16,)).sum().backward()
        assert taken(override) == (1, 1) and other.calls == len(ops)
        if ours_ends_first:
            override.undo()
            torch.testing.assert_close(F.rms_norm(x, (16,)), theirs, rtol=0, atol=0)
            assert taken(override) == (1, 1) and other.calls == len(ops) + 1
            assert aten._patches[DEVICE.type][-1].counts[ATEN_FORWARD] == {TAKEN: 1, "undone": 1}
            with overridden() as second:  # above the other
                F.rms_norm(x, (16,))
                assert taken(second) == (1, 0) and other.calls == len(ops) + 1
    finally:
        other.leave()
    override.undo()
    overridden().undo()  # takes away what could not be taken away before
    assert kernels() == before


def test_the_library_below_leaves_first():
    """The kernel that was found is gone. What is declined is right all the same, and one warning says what to do."""
    x = norm_of(3, 16, dtype=FP64)
    theirs = torch.autograd.grad(F.rms_norm(x, (16,)).sin().sum(), x)
    below = Other() if HAS_GPU else Other(ops=(ATEN_FORWARD,))
    with overridden() as override:
        below.leave()
        with pytest.warns(UserWarning, match="was deregistered.* call override_aten"):
            ours = torch.autograd.grad(F.rms_norm(x, (16,)).sin().sum(), x)
        torch.testing.assert_close(ours, theirs)
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "dtype": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.rms_norm(x.detach(), (16,))
            F.rms_norm(x.detach().float(), (16,))
        assert taken(override) == (1, 0)


@pytest.mark.parametrize("native_comes_first", [True, False])
def test_beside_overrides_of_pytorchs_own(native_comes_first, monkeypatch):
    """torch._native, which puts quack's kernels there on GPUs that have them, with a kernel that takes one width."""
    native = pytest.importorskip("torch._native.registry", reason="PyTorch has it from 2.12 on")
    for name in (
        "_graphs",
        "_dsl_name_to_lib_graph",
        "_dispatch_key_to_lib_graph",
        "_op_symbol_to_lib_graph",
    ):
        monkeypatch.setattr(native, name, {})
    monkeypatch.setattr(native, "_filter_state", native._FilterState())
    sevens = torch.full((3, 16), 7.0, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    before = kernels()

    def register():
        native.register_op_override(
            "test",
            "aten",
            ATEN_FORWARD,
            KEY,
            lambda x, *_: x.shape[-1] == 16,
            lambda *_: tuple(map(torch.clone, sevens)),
        )
        native._register_all_overrides()

    narrow, wide = norm_of(3, 16, requires_grad=False), norm_of(3, 32, requires_grad=False)
    theirs = F.rms_norm(wide, (32,))
    if native_comes_first:
        register()
    with overridden() as override:
        if not native_comes_first:
            register()
        assert (F.rms_norm(narrow, (16,)) == 7).all() != native_comes_first
        torch.testing.assert_close(F.rms_norm(wide, (32,)), theirs)
        assert taken(override) == (1 + native_comes_first, 0)
    assert (F.rms_norm(narrow, (16,)) == 7).all()
    torch.testing.assert_close(F.rms_norm(wide, (32,)), theirs, rtol=0, atol=0)
    native.deregister_op_overrides(disable_dsl_names="test")
    overridden().undo()
    assert kernels() == before
