# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope with every two options together, on each backend by each route: values and gradients against float64.

As test_pairs_of_options.py. Without k it is rms_norm_rope.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from covering import pairwise
from every_op import OPS, Call, of_rope
from helpers import DEVICE, FP32
from option_cases import ROPE_CALLS, is_rope_call, rope_case
from option_pairs import ROUTES, values_of
from rope_cases import RopeCall, RopeCase, check_forward, check_gradients, make

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
    "needs": ("all", *NAMES, "none"),
    "used": ("all", *RESULTS),
    "route": ROUTES,
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


def made(case: Mapping[str, Any], seed: int) -> tuple[Call, RopeCall]:
    """The call as its user makes it, and as a backend gets it."""
    others = "rows", "is_outside", "needs", "used", "route"
    of_backend = rope_case(**{name: value for name, value in case.items() if name not in others})
    given = make(of_backend, DEVICE, seed)
    *_, cos, sin, positions = given.tensors
    if case["is_outside"]:
        far = min(2**40, torch.iinfo(case["position_dtype"]).max)
        positions[-1, -1] = random.Random(seed).choice((-1, len(cos), far))
    call = of_rope(of_backend, made=given)
    fixed = call.fixed
    if case["rows"] == "(1, T, R)":
        fixed |= {"cos": cos[None], "sin": sin[None]}
    if case["rows"] == "(T,)":
        fixed["position_ids"] = positions[0]
    of_q = {"x": "q", "weight": "q_weight"}
    leaves = {of_q.get(name, name): each for name, each in call.leaves.items()}
    return call._replace(leaves=leaves, fixed=fixed), given


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(backend, number, monkeypatch):
    case = CASES[number]
    seed, results, gradients = values_of(
        OPS[1], case, lambda seed: made(case, seed)[0], RESULTS, backend, monkeypatch, apart=RESULTS
    )
    assert all(each.requires_grad == (case["needs"] != "none") for each in results.values())
    _, call = made(case, seed)
    check_forward(call, *(None if each is None else each.detach() for each in map(results.get, RESULTS)))
    used = (
        None if dy is None else dy if case["used"] in ("all", name) else torch.zeros_like(dy)
        for name, dy in zip(RESULTS, call.dys, strict=True)
    )
    found = {f"d{name}": each for name, each in gradients.items()}
    check_gradients(call._replace(dys=tuple(used)), found)
