# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope with every two options together, on each backend by each route: values and gradients against float64.

As test_pairs_of_options.py. Without k it is rms_norm_rope.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from covering import pairwise
from helpers import DEVICE, FP32, settle_interpreters
from option_cases import ROPE_CALLS, is_rope_call, rope_case
from rope_cases import RopeCall, RopeCase, check_forward, check_gradients, make
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope, rope
from tilegym_rmsnorm.ops.rope import op as rope_op
from tilegym_rmsnorm.ops.rope.op import FORWARD
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPTIONS

NAMES, RESULTS = ("q", "k", "q_weight", "k_weight"), ("q_out", "k_out")
LAYOUTS = "contiguous", "transposed", "offset", "gaps", "columns", "expanded"
ROWS = {  # shapes of tables or positions: a RopeCase's positions, and has_rows_of_batch
    "(T, R)": (None, False),
    "(1, T, R)": (None, False),
    "(B, T, R)": (None, True),
    "(T,)": ("one", False),
    "(1, T)": ("one", False),
    "(B, T)": ("each", False),
}
OPTIONS = ROPE_CALLS | {
    "batch": (2, 1),
    "n": (64, 80, 7, 6),
    "rotary_dim": (64, 16, 20, 4, 6),
    "rows": tuple(ROWS),
    "is_outside": (False, True),  # the table does not have the last position
    "eps": (1e-3, 0.25),
    "layout": ("packed", "gate", *LAYOUTS),
    "dy_layout": LAYOUTS,
    "table_layout": ("contiguous", "gaps", "offset", "columns"),
    "needs": ("all", *NAMES, "none"),  # which tensors require grad
    "used": ("all", "q_out", "k_out"),  # the results that a loss depends on
    "route": ("eager", "known", "op", "create_graph"),
}


def is_differentiable(case: Mapping[str, Any]) -> bool:
    """Whether there is what requires grad, and what the loss depends on."""
    needs, used = case["needs"], case["used"]
    if needs in ("q_weight", "k_weight") and case[needs] == "none":
        return False
    if used == "all":
        return needs != "none" or case["route"] != "create_graph"
    return needs in ("all", used[0], f"{used[0]}_weight") and not case["is_outside"]


# Options that is_rope_call forbids some values of together, whatever the others are
PARTS = (
    ("positions", "has_rows_of_batch", "position_dtype"),
    ("heads", "k_weight", "k_weight_dtype"),
    ("q_weight", "weight_dtype"),
    ("table_dtype", "dtype"),
    ("rotary_dim", "n"),
)
PLAIN = RopeCase(weight_dtype=FP32, k_weight_dtype=FP32)._asdict() | {
    "q_weight": "vector",
    "k_weight": "vector",
}
RULES: tuple[Callable[[Mapping[str, Any]], bool], ...] = (
    lambda case: (case["positions"], case["has_rows_of_batch"]) == ROWS[case["rows"]],
    lambda case: not case["is_outside"] or case["positions"] is not None,
    lambda case: case["heads"][1] > 0 or case["needs"] not in ("k", "k_weight"),
    lambda case: case["heads"][1] > 0 or case["used"] == "all",
    is_differentiable,
    *(
        lambda case, names=names: is_rope_call(PLAIN | {name: case[name] for name in names})
        for names in PARTS
    ),
    is_rope_call,
)


def is_allowed(case: Mapping[str, Any]) -> bool:
    """Ask every rule: what one forbids is left at once, not after all values of what another one reads."""
    missing = None
    for is_right in RULES:
        try:
            if not is_right(case):
                return False
        except KeyError as error:
            missing = missing or error
    if missing is not None:
        raise missing
    return True


CASES = pairwise(OPTIONS, is_allowed)


def made(case: Mapping[str, Any], seed: int) -> RopeCall:
    """The call as a backend gets it."""
    others = "rows", "is_outside", "needs", "used", "route"
    fields = {name: value for name, value in case.items() if name not in others}
    call = make(rope_case(**fields), DEVICE, seed)
    if case["is_outside"]:
        far = min(2**40, torch.iinfo(case["position_dtype"]).max)
        call.tensors[6][-1, -1] = random.Random(seed).choice((-1, len(call.tensors[4]), far))
    return call


def present(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: each for name, each in zip(names, values, strict=True) if each is not None}


def run(case: Mapping[str, Any], call: RopeCall, backend: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results, and the gradients that there are, by their names."""
    needs, used, route = (case[name] for name in ("needs", "used", "route"))
    *heads, cos, sin, positions = call.tensors
    leaves = [
        None if each is None else each.detach().requires_grad_(needs in ("all", name))
        for name, each in zip(NAMES, heads, strict=True)
    ]
    if case["rows"] in ("(1, T, R)", "(B, T, R)"):
        cos, sin = (each.unflatten(0, (-1, case["length"])) for each in (cos, sin))
    if case["rows"] == "(T,)":
        positions = positions[0]
    spec = call.spec
    if route == "op":
        results = FORWARD(*leaves, cos, sin, positions, *spec[1:], backend)
    else:
        named = dict(zip(ROPE_OPTIONS, spec[1:], strict=True))
        named |= {"position_ids": positions, "backend": backend}
        if leaves[1] is None:
            results = rms_norm_rope(leaves[0], leaves[2], cos, sin, **named), None
        else:
            results = qk_norm_rope(*leaves, cos, sin, **named)
    found, dys = present(RESULTS, results), present(RESULTS, call.dys)
    recorded = {name: each for name, each in present(NAMES, leaves).items() if each.requires_grad}
    outputs = [name for name in found if used in ("all", name)]
    assert all(found[name].requires_grad == bool(recorded) for name in outputs)
    gradients = ()
    if recorded:
        gradients = torch.autograd.grad(
            [found[name] for name in outputs],
            list(recorded.values()),
            [dys[name] for name in outputs],
            create_graph=route == "create_graph",
            allow_unused=used != "all",
        )
    assert used != "all" or None not in gradients
    given = present([f"d{name}" for name in recorded], gradients)
    if route == "create_graph":  # PyTorch's operations keep other strides
        given = {name: each.detach().contiguous() for name, each in given.items()}
    return {name: each.detach() for name, each in found.items()}, given


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(backend, number, monkeypatch):
    case = CASES[number]
    seed = random.SystemRandom().getrandbits(31)
    print(case, "seed", seed)
    call = made(case, seed)
    if case["route"] == "known":
        settle_interpreters(monkeypatch)
        run(case, made(case, seed + 1), backend)
        for owner, name in ((rope, "checked_rope"), (rope_op, "checked_rope_backward")):
            monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("not a known call"))
    outputs, gradients = run(case, call, backend)
    check_forward(call, outputs["q_out"], outputs.get("k_out"))
    used = (
        None if dy is None else dy if case["used"] in ("all", name) else torch.zeros_like(dy)
        for name, dy in zip(RESULTS, call.dys, strict=True)
    )
    check_gradients(call._replace(dys=tuple(used)), gradients)
