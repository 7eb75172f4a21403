# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope of backend "cutile" under levels of reproducibility, by the interpreter: which heads share a kernel, and
how they are shared. machine_code/test_one_order_rope.py reads in which order compiled kernels add."""

import pytest
import torch
from every_op import assert_same_bits, present
from helpers import BF16, FP32
from rope_cases import CASES, RopeCall, RopeCase, check_backward, check_forward, make
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.ops.rope.spec import RopeWanted
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import launcher, rope  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans import rope as plans  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_empty")
PLAIN = RopeCase(BF16, batch=3, length=7, heads=(5, 2), weight_dtype=BF16)
KINDS = {
    "plain": PLAIN,
    "a part of each head": PLAIN._replace(n=128, layout="packed"),
    "pairs side by side": PLAIN._replace(interleaved=True, tables="half"),
    "a row of tables for each token": PLAIN._replace(has_rows_of_batch=True),
    "positions": PLAIN._replace(positions="each", table_dtype=BF16),
    "one row of positions": PLAIN._replace(positions="one"),
    "weights of heads": PLAIN._replace(weight=("heads", "heads")),
    "without k": PLAIN._replace(heads=(5, 0)),
    "float32": PLAIN._replace(dtype=FP32, n=256, rotary_dim=256),
    "llama": PLAIN._replace(casting="llama", rounding="each"),
    "composed": PLAIN._replace(n=12, rotary_dim=6),
}


def run(call: RopeCall, level: int, wanted: RopeWanted | None = None) -> list[Tensor | None]:
    """Return q_out, k_out, dq, dk, dq_weight, dk_weight."""
    spec = call.spec._replace(reproducible=level)
    outputs = launch.qk_norm_rope_forward(spec, call.tensors)
    return [
        *outputs,
        *launch.qk_norm_rope_backward(spec, call.backward_tensors, call.wanted if wanted is None else wanted),
    ]


def part_of(call: RopeCall, b: slice, t: slice) -> RopeCall:
    """Return the call of some sequences and steps, each with its rows of cos and sin."""
    q, k, *weights, cos, sin, positions = call.tensors
    length = q.shape[1]
    if positions is not None:
        positions = positions[b if positions.shape[0] > 1 else slice(None), t]
    elif cos.shape[0] > length:
        cos, sin = (each.view(-1, length, each.shape[1])[b, t].flatten(0, 1) for each in (cos, sin))
    else:
        cos, sin = cos[t], sin[t]
    q, k, dq, dk = (None if each is None else each[b, t] for each in (q, k, *call.dys))
    return call._replace(tensors=(q, k, *weights, cos, sin, positions), dys=(dq, dk))


PARTS = [
    (slice(1, 2), slice(3, 4)),  # one token
    (slice(None), slice(3, 4)),  # one step
    (slice(1, 2), slice(None)),  # one sequence
    (slice(0, 2), slice(2, 7)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_does_not_depend_on_its_batch(kind):
    call = make(KINDS[kind])
    whole = run(call, BATCH)
    for b, t in PARTS:
        found = run(part_of(call, b, t), BATCH)
        for one, every in zip(found[:4], whole[:4], strict=True):
            assert (one is None) == (every is None)
            if one is not None:
                assert one.is_contiguous() and not one._is_view()
                assert torch.equal(one, every[b, t]), (kind, b, t)


@pytest.mark.parametrize("layout", ["slice", "gaps", "offset", "transposed"])
@pytest.mark.parametrize("length", [1, 6])
def test_bits_do_not_depend_on_where_heads_lie(layout, length):
    case = PLAIN._replace(length=length, heads=(4, 2))
    call, expected = make(case), None
    for each in ("contiguous", layout):
        laid_out = make(case._replace(layout=each, dy_layout=each))
        given = [laid_out.tensors[0], laid_out.tensors[1], *laid_out.dys]
        for own, values in zip(given, (call.tensors[0], call.tensors[1], *call.dys), strict=True):
            own.copy_(values)
        same = call._replace(tensors=(*given[:2], *call.tensors[2:]), dys=tuple(given[2:]))
        found = run(same, BATCH)
        expected = expected or found
        assert_same_bits(found, expected)


@pytest.mark.parametrize("heads", [(32, 8), (3, 1)])
def test_bits_do_not_depend_on_how_many_heads_there_are(heads):
    """As of a rank of tensor parallelism."""
    call = make(PLAIN._replace(heads=heads))
    q, k, *others = call.tensors
    first = call._replace(
        tensors=(q[:, :, :1], k[:, :, :1], *others), dys=tuple(each[:, :, :1] for each in call.dys)
    )
    whole, found = run(call, BATCH), run(first, BATCH)
    assert_same_bits(found[:4], [each[:, :, :1] for each in whole[:4]])


@pytest.mark.parametrize("case", [*CASES])
def test_results_are_right(case):
    call = make(CASES[case])
    found = run(call, BATCH | DEVICE)
    check_forward(call, *found[:2])
    check_backward(call, *found[2:])


@pytest.fixture
def few_sms(monkeypatch):
    """Of few SMs walks are long."""
    monkeypatch.setattr(plans, "FIXED_SMS", 12)
    yield
    launcher.launcher_of.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_sums_depend_on_neither_the_gpu_nor_padding(kind, few_sms, monkeypatch):
    """Steps behind the others, of which dy is zero."""
    case = KINDS[kind]._replace(batch=2, length=70)
    longer = make(case._replace(length=150))
    for each in longer.dys:
        if each is not None:
            each[:, 70:] = 0
    call, found = part_of(longer, slice(None), slice(0, 70)), []
    for sm_count in (3, 2, 7, 132):
        monkeypatch.setattr(InterpretedMachine, "facts", InterpretedMachine.facts._replace(sm_count=sm_count))
        launcher.launcher_of.cache_clear()
        found.append(tuple(run(call, BATCH | DEVICE)[4:]))
    if kind != "composed":
        found += [
            tuple(run(part_of(longer, slice(None), slice(0, t)), BATCH | DEVICE)[4:]) for t in (71, 80, 150)
        ]
    for each in found[1:]:
        assert_same_bits(present(each), present(found[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_dx_is_that_of_trained_weights(kind):
    call = make(KINDS[kind])
    frozen, trained = (tuple(run(call, BATCH, wanted)[:4]) for wanted in (RopeWanted(), None))
    assert_same_bits(present(frozen), present(trained))


def test_a_frozen_weight_has_the_kernel_of_a_trained_one(monkeypatch):
    launched = []
    bind = InterpretedMachine.bind

    def noting(self, function, variant, constants):
        launch = bind(self, function, variant, constants)

        def run(grid, arguments):
            launched.append(
                (function.__name__, constants, [len(each) for each in arguments if type(each) is tuple])
            )
            launch(grid, arguments)

        return run

    monkeypatch.setattr(InterpretedMachine, "bind", noting)
    launcher.launcher_of.cache_clear()
    call = make(PLAIN)
    run(call, BATCH)
    trained = [each for each in launched if each[0] == "backward_rope"]
    launched.clear()
    run(call, BATCH, RopeWanted(dk_weight=BF16))
    assert [each for each in launched if each[0] == "backward_rope"] == trained
    launcher.launcher_of.cache_clear()


def test_what_no_kernel_counts_in_is_refused():
    """PyTorch's operations around a norm's kernels would add a head in another order."""
    call = make(RopeCase(BF16, layout="far"), "meta")
    machine = InterpretedMachine()
    with pytest.raises(ValueError, match="reproducible: expected q and k of at most"):
        rope.problem_of(machine, call.spec._replace(reproducible=BATCH), call.tensors)
    assert rope.problem_of(machine, call.spec, call.tensors) is None


def test_a_margin_beside_fixed_walks_is_refused():
    call = make(PLAIN)
    with (
        settings.use_sm_margin(1),
        pytest.raises(ValueError, match=r'sm_margin: expected 0 with reproducible\("device"\)'),
    ):
        run(call, BATCH | DEVICE)
