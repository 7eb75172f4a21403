# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of qk_norm_rope and rms_norm_rope that are refused, and what the errors say. Hints in errors are followed as
they are written: none leads to a wrong result.

A call is made of q and k (B, T, H, D), a table, and the position of each token. Then q, k and cos are laid out as other
libraries do, with sizes that are often equal. Of its error each hint whose condition holds is followed, up to a result,
which is compared with float64, or to an error without such a hint."""

import contextlib
import dataclasses
import random
import re
from typing import Any, NamedTuple

import pytest
import rope_calls
import torch
from helpers import DEVICE
from rope_calls import case, ours
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope
from tilegym_rmsnorm.ops.rope.op import FORWARD


def test_a_saved_tensor_that_changed_is_refused():
    q, *others = case()
    leaf = q.requires_grad_()
    q_out, k_out = ours(leaf, *others)
    leaf.data = torch.randn(2, 5, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="k: expected shape"):
        (q_out.sum() + k_out.sum()).backward()


Q, K, W, COS = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 2, 8), torch.ones(8), torch.ones(5, 8)
POSITIONS = torch.zeros(5, dtype=torch.int64)
BAD = [
    ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"q": Q.long()}, TypeError, "q: expected a dtype of"),
    ({"q": torch.ones(5, 8)}, ValueError, r"q: expected shape \(B, T, H, D\) or \(T, H, D\)"),
    ({"k": K[:, :4]}, ValueError, r"k: expected shape \(2, 5, any number of heads, 8\)"),
    ({"k": torch.ones(2, 5, 2, 4)}, ValueError, "k: expected shape"),
    ({"k": K.double()}, TypeError, "k: expected the dtype of q, torch.float32, got torch.float64"),
    ({"k": K[0]}, ValueError, "k: expected shape"),
    (
        {"q_weight": torch.ones(4)},
        ValueError,
        r"q_weight: expected shape \(8,\), or \(4, 8\) of the heads of q",
    ),
    ({"q_weight": torch.ones(2, 8)}, ValueError, r"q_weight: expected shape \(8,\), or \(4, 8\)"),
    ({"k_weight": torch.ones(4, 8)}, ValueError, r"k_weight: expected shape \(8,\), or \(2, 8\)"),
    ({"k_weight": 1.0}, TypeError, "k_weight: expected a torch.Tensor or None, got float"),
    ({"q_weight": W.to("meta")}, ValueError, "q_weight: expected the device of q"),
    (
        {"cos": torch.ones(5, 5), "sin": torch.ones(5, 5)},
        ValueError,
        "expected 8 columns, one for each rotated element, or 4",
    ),
    ({"cos": torch.ones(4, 8)}, ValueError, "sin: expected shape and dtype of cos"),
    ({"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}, ValueError, "q of shape .* has 5 positions"),
    (
        {"cos": torch.ones(3, 5, 8), "sin": torch.ones(3, 5, 8)},
        ValueError,
        r"cos: expected shape \(5, 8\), \(1, 5, 8\) or \(2, 5, 8\)",
    ),
    ({"cos": COS.half()}, TypeError, r"cos: expected torch.float32, got torch.float16: pass cos.float\(\)"),
    (
        {"cos": COS.clone().requires_grad_()},
        ValueError,
        r"cos: expected a table without a gradient: detach\(\) it",
    ),
    ({"sin": COS.clone().requires_grad_()}, ValueError, "sin: expected a table without a gradient"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim: expected an even number up to D, 8, got 3"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim: expected an even number up to D, 8, got 10"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim: expected at least 2, or None, got 0"),
    ({"rotary_dim": 4.0}, TypeError, "rotary_dim: expected an int or None"),
    ({"interleaved": 1}, TypeError, "interleaved: expected a bool"),
    (
        {"position_ids": POSITIONS.short()},
        TypeError,
        r"expected torch.int64 or torch.int32, got torch.int16: pass position_ids.long\(\)",
    ),
    (
        {"position_ids": POSITIONS.float()},
        TypeError,
        r"expected torch.int64 or torch.int32, got torch.float32$",
    ),
    ({"position_ids": POSITIONS.bool()}, TypeError, r"expected torch.int64 or torch.int32, got torch.bool$"),
    (
        {"position_ids": POSITIONS[:4]},
        ValueError,
        r"position_ids: expected shape \(5,\), \(1, 5\) or \(2, 5\)",
    ),
    ({"position_ids": POSITIONS.to_sparse()}, TypeError, "position_ids: expected layout torch.strided"),
    ({"cos": COS.to_sparse()}, TypeError, "cos: expected layout torch.strided"),
    ({"position_ids": [0]}, TypeError, "position_ids: expected a torch.Tensor or None"),
    (
        {"position_ids": POSITIONS, "cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)},
        ValueError,
        "cos: expected two dimensions",
    ),
    ({"rope_rounding": "all"}, ValueError, "rope_rounding: expected one of 'end', 'norm', 'each'"),
    ({"casting": "none"}, ValueError, "casting: expected one of"),
    ({"eps": -1.0}, ValueError, "eps: expected a finite number"),
    ({"offset": "1"}, TypeError, "offset: expected a finite number"),
    ({"backend": "cuda"}, ValueError, "backend"),
    ({"cos": [1.0]}, TypeError, "cos: expected a torch.Tensor, got list"),
    ({"cos": COS.long(), "sin": COS.long()}, TypeError, "cos: expected torch.float32, got torch.int64"),
    (
        {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8)},
        ValueError,
        r"row i is of position i, pass cos\[p:p \+ 5\] for positions from p on, or position_ids$",
    ),
    (
        {"cos": torch.ones(10, 8), "sin": torch.ones(10, 8)},
        ValueError,
        r"if q and k are \(B, T, H, D\) and each sequence has rows of its own, .* view cos and sin as \(2, 5, 8\);",
    ),
    (
        {"q": torch.ones(2, 4, 5, 8)},
        ValueError,
        r"if q is \(B, H, T, D\) and k is \(B, T, H, D\), pass q.transpose\(1, 2\)$",
    ),
    (
        {"q": Q.transpose(1, 2), "k": torch.ones(2, 4, 5, 8)},
        ValueError,
        r"if q and k are \(B, H, T, D\), pass q.transpose\(1, 2\) and k.transpose\(1, 2\)$",
    ),
    ({"q": torch.ones(2, 5, 32), "k": torch.ones(2, 5, 16)}, ValueError, r"view them as \(B, T, H, D\)"),
    ({"q": torch.ones(2, 5, 16), "k": torch.ones(2, 5, 16)}, ValueError, r"view them as \(B, T, H, D\)"),
    (
        {"cos": torch.ones(5, 2), "sin": torch.ones(5, 2)},
        ValueError,
        "a part of each head is rotated, pass rotary_dim=2, if they are one for each rotated element, or 4, if one for "
        "each pair$",
    ),
    ({"position_ids": POSITIONS, "cos": COS[:0], "sin": COS[:0]}, ValueError, "a position at least"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_errors(changes, error, text):
    given = {"q": Q, "k": K, "q_weight": W, "k_weight": W, "cos": COS, "sin": COS} | changes
    with pytest.raises(error, match=text):
        qk_norm_rope(**given)
    # also where an earlier call was right: a number of another type, which equals one of a known call, is refused
    qk_norm_rope(Q, K, W, W, COS, COS)
    with pytest.raises(error, match=text):
        qk_norm_rope(**given)


def test_errors_name_the_arguments_of_one_tensor():
    with pytest.raises(ValueError, match=r"^weight: expected shape \(8,\), or \(4, 8\) of the heads of x"):
        rms_norm_rope(Q, torch.ones(3), COS, COS)
    with pytest.raises(ValueError, match="^x: expected shape"):
        rms_norm_rope(COS, W, COS, COS)
    odd = torch.ones(2, 5, 4, 7)
    with pytest.raises(
        ValueError, match="rotary_dim: expected an even number of elements, since D, 7, is odd"
    ):
        rms_norm_rope(odd, None, COS[:, :7], COS[:, :7])


def test_no_gradient_of_k_without_k():
    given = Q[..., :1, :], torch.ones(3), Q[..., :1, :], None, None, None, COS, COS, None, 0
    with pytest.raises(ValueError, match="dk_out: expected None without k, got a Tensor"):
        torch.ops.tilegym_rmsnorm.qk_norm_rope_backward(*given, 1e-6, 0.0, 8, False, "once", "end", None)


def test_k_is_no_option():
    with pytest.raises(
        TypeError, match="k: expected a torch.Tensor, got NoneType: rms_norm_rope takes one tensor"
    ):
        qk_norm_rope(Q, None, W, None, COS, COS)


LAYOUTS = ("BTHD", "BHTD", "TBHD", "THD", "HTD", "BTM", "TM")  # M is H * D
ROWS = ("table", "of steps", "of each", "behind another", "by steps")  # of cos
SHAPES = ("as it is", "for heads", "before", "behind", "around")  # where cos has extents of 1


class Truth(NamedTuple):
    """q, k (B, T, H, D), and the rows (B, T) of a table for them: from `first` on, or any where it is None."""

    q: Tensor
    k: Tensor | None
    weights: tuple[Tensor | None, Tensor | None]
    table: tuple[Tensor, Tensor]
    positions: Tensor
    first: int | None
    rotary_dim: int
    rows: str  # of ROWS

    def expected(self) -> tuple[Tensor, ...]:
        given = self.q, self.k, *self.weights, *self.table, self.positions
        return rope_calls.expected(*given, rotary_dim=self.rotary_dim)


@dataclasses.dataclass(frozen=True)
class Call:
    """Its arguments, and the layouts of q and k, which rms_norm_rope calls x."""

    truth: Truth
    q: Tensor
    k: Tensor | None
    layouts: dict[str, str]
    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None = None
    rotary_dim: int | None = None

    def __str__(self) -> str:
        tensors = (self.q, self.k, self.cos, self.position_ids)
        sizes = [None if each is None else tuple(each.shape) for each in tensors]
        return f"{self.layouts} {sizes}, rows {self.truth.rows} from {self.truth.first}, {self.rotary_dim}"

    def run(self) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"eps": rope_calls.EPS, "rotary_dim": self.rotary_dim}
        given = self.cos, self.sin
        # The errors are those of every backend, and no kernels are compiled for so many shapes.
        options |= {"position_ids": self.position_ids, "backend": "torch"}
        if self.k is None:
            return (rms_norm_rope(self.q, self.truth.weights[0], *given, **options),)
        return qk_norm_rope(self.q, self.k, *self.truth.weights, *given, **options)

    def is_right(self, outputs: tuple[Tensor, ...]) -> bool:
        for y, name, want in zip(outputs, "qk", self.truth.expected(), strict=False):
            layout = self.layouts[name]
            if "M" in layout:  # heads in one dimension are none
                return False
            y, layout = (y, layout) if "B" in layout else (y[None], "B" + layout)
            y = y.permute(*map(layout.index, "BTHD"))
            if y.shape != want.shape or not torch.allclose(y.double(), want, atol=1e-4):
                return False
        return True


def laid_out(x: Tensor, layout: str) -> Tensor:
    dims = layout.replace("M", "HD")
    x = (x if "B" in dims else x[0]).permute(*map(("BTHD" if "B" in dims else "THD").index, dims))
    return x.flatten(-2) if "M" in layout else x


def rows_of(table: Tensor, positions: Tensor, rows: str, shape: str) -> Tensor:
    """cos or sin of a call."""
    of_each = table[positions]
    found = {
        "table": table,
        "of steps": of_each[0],
        "of each": of_each,
        "behind another": of_each.flatten(0, 1),
        "by steps": of_each.transpose(0, 1).flatten(0, 1),
    }[rows]
    return {
        "as it is": found,
        "for heads": found.unsqueeze(-2),
        "before": found[None, None],
        "behind": found[..., None, None, :],
        "around": found[None].unsqueeze(-2),
    }[shape]


def made(chance: random.Random, **fixed: Any) -> Call:
    """fixed: some of its choices."""

    def choose(name: str, *values: Any) -> Any:
        value = chance.choice(values)
        return fixed.get(name, value)

    layout = choose("layout", *LAYOUTS)
    b = choose("b", 1, 2, 3, 4) if "B" in layout else 1
    t, hq, hk = (choose(name, 1, 2, 3, 4, 5) for name in ("t", "hq", "hk"))
    d = choose("d", 8, 16)
    rotary_dim = choose("rotary_dim", d, d, d // 2, d // 4)
    count = max(t, choose("count", t, t + 1, t + 3, b * t, hq, b, 9))
    rows, shape = choose("rows", *ROWS), choose("shape", SHAPES[0], *SHAPES)
    generator = torch.Generator().manual_seed(chance.randrange(2**32))

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    first = choose("first", None, 0, count - t)
    has_positions = rows == "table" and choose("has_positions", True, False, False)
    if rows == "of steps" or (count == t and not has_positions):  # one position after another
        first = count - t if first is None else first
    positions = torch.randint(0, count, (b, t), generator=generator).to(DEVICE)
    if first is not None:
        positions = torch.arange(first, first + t, device=DEVICE).expand(b, t)
    columns = rotary_dim // choose("columns", 1, 2)
    given_dim = choose("given_dim", None, rotary_dim, rotary_dim)
    if columns * 2 == d:  # without it they would be taken for one column a pair
        given_dim = rotary_dim
    table = draw(count, columns), draw(count, columns)
    q, k = draw(b, t, hq, d), draw(b, t, hk, d) if choose("has_k", True, True, False) else None
    weights = tuple(draw(d) if choose("has_weight", True, False) else None for _ in "qk")
    weights = weights if k is not None else (weights[0], None)
    truth = Truth(q, k, weights, table, positions, first, rotary_dim, rows)
    other = {"BTHD": "BHTD", "BHTD": "BTHD"}.get(layout, layout)
    layouts = {"q": layout, "k": choose("layout_of_k", layout, layout, layout, other)}
    return Call(
        truth,
        laid_out(q, layout),
        None if k is None else laid_out(k, layouts["k"]),
        layouts,
        *(rows_of(each, positions, rows, shape) for each in table),
        positions if has_positions else None,
        given_dim,
    )


def holds(condition: str, call: Call) -> bool:
    """Whether what stands between "if" and a hint's action is so."""
    truth = call.truth
    facts = {
        "row i is of position i": truth.rows == "table",
        "each sequence has rows of its own, one sequence behind another": truth.rows
        in ("of each", "behind another"),
        "a part of each head is rotated": truth.rotary_dim < truth.q.shape[-1],
    }
    for fact, is_so in facts.items():
        if condition.endswith(fact):
            condition = condition.removesuffix(fact).removesuffix(" and ")
            if not is_so:
                return False
    pattern = r"(q and k|q|k|x) (?:is|are) \((.*?)\)"
    assert not re.sub(rf"{pattern}(?: and (?=[qk] ))?", "", condition), f"no such condition: {condition}"
    return all(
        call.layouts[name.replace("x", "q")] == layout.replace("H * D", "M").replace(", ", "")
        for names, layout in re.findall(pattern, condition)
        for name in names.split(" and ")
    )


def followed(hint: str, call: Call) -> list[Call]:
    """The calls that a hint leads to."""
    parts = re.fullmatch(r"(?:if (.*?), (?=pass|view))?(pass|view) (.*)", hint, re.DOTALL)
    condition, verb, action = parts.groups()
    if condition is not None and not holds(condition, call):
        return []
    if verb == "view":
        return [viewed(call, *action.split(" as "))]
    if action.startswith("rotary_dim="):
        is_of_pairs = call.cos.shape[-1] < call.truth.rotary_dim
        given = re.findall(r"(\d+), if (they|one for each pair)", action)
        return [
            dataclasses.replace(call, rotary_dim=int(value))
            for value, kind in given
            if (kind != "they") is is_of_pairs
        ]
    if found := re.search(r"cos\[p:p \+ (\d+)\].* or position_ids$", action):
        flat = call.q.ndim == 3
        calls = [dataclasses.replace(call, position_ids=call.truth.positions[0 if flat else slice(None)])]
        if (p := call.truth.first) is not None:
            cos, sin = (each[p : p + int(found[1])] for each in (call.cos, call.sin))
            calls.append(dataclasses.replace(call, cos=cos, sin=sin))
        return calls
    return [transposed(call, action)]


def viewed(call: Call, what: str, shape: str) -> Call:
    if what == "cos and sin":
        size = tuple(map(int, shape.strip("()").split(", ")))
        return dataclasses.replace(call, cos=call.cos.reshape(size), sin=call.sin.reshape(size))
    assert what in ("it", "them")
    (b, t, _, d), letters = call.truth.q.shape, shape.strip("()").replace(", ", "")
    size = (b, t, -1, d) if "B" in letters else (t, -1, d)
    k = call.k if call.k is None else call.k.reshape(size)
    return dataclasses.replace(call, q=call.q.reshape(size), k=k, layouts=dict.fromkeys("qk", letters))


def transposed(call: Call, action: str) -> Call:
    for each in action.split(" and "):
        name, first, second = re.fullmatch(r"([qkx])\.transpose\((\d), (\d)\)", each).groups()
        name, i, j = name.replace("x", "q"), int(first), int(second)
        letters = list(call.layouts[name])
        letters[i], letters[j] = letters[j], letters[i]
        changed = {name: getattr(call, name).transpose(i, j)}
        call = dataclasses.replace(call, **changed, layouts=call.layouts | {name: "".join(letters)})
    return call


class End(NamedTuple):
    is_right: bool
    way: tuple[str, ...]  # the hints


def ends(call: Call, way: tuple[str, ...] = ()) -> list[End]:
    """The ends of the ways of hints that do not end with an error."""
    assert len(way) < 6, "hints go in a circle"
    try:
        outputs = call.run()
    except ValueError as error:
        _, _, hints = str(error).partition(", got ")[2].partition(": ")
        return [
            end
            for hint in filter(None, hints.split("; "))
            for each in followed(hint, call)
            for end in ends(each, (*way, hint))
        ]
    return [End(call.is_right(outputs), way)]


def is_taken_for_another(call: Call) -> bool:
    """Whether its shapes fit by chance, or would once heads are where they belong: so no error is raised, in which a
    hint could be."""
    q, k, *_ = call.truth
    call = dataclasses.replace(call, rotary_dim=call.truth.rotary_dim)
    for each in (call, dataclasses.replace(call, q=q, k=k, layouts=dict.fromkeys("qk", "BTHD"))):
        with contextlib.suppress(ValueError):
            if not each.is_right(each.run()):
                return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_no_hint_leads_to_a_wrong_result(seed):
    chance, right = random.Random(seed), 0
    for _ in range(400):
        call = made(chance)
        if is_taken_for_another(call):
            continue
        for end in ends(call):
            assert end.is_right, f"{call}: {end.way}"
            right += end.way != ()
    assert right > 200


PLAIN = {"layout": "BTHD", "b": 2, "t": 5, "hq": 4, "hk": 3, "d": 16, "rotary_dim": 16, "columns": 1}
PLAIN |= {"count": 9, "first": 2, "rows": "of steps", "shape": "as it is", "has_k": True, "has_weight": True}
PLAIN |= {"has_positions": False, "given_dim": None, "layout_of_k": "BTHD"}
OTHERS = {
    "a longer table": {"rows": "table"},
    "a longer table, one step": {"rows": "table", "t": 1},
    "a longer table, any positions": {"rows": "table", "first": None},
    "a longer table of one tensor": {"rows": "table", "layout": "THD", "has_k": False},
    "as many rows as heads": {"rows": "table", "count": 5, "t": 3, "hq": 5},
    "sequences behind each other": {"rows": "behind another", "first": None},
    "(1, 1, T, R)": {"shape": "before"},
    "(1, T, 1, R)": {"shape": "around"},
    "(T, 1, 1, R)": {"shape": "behind"},
    "(B, T, 1, R)": {"rows": "of each", "first": None, "shape": "for heads"},
    "(1, 1, positions, R)": {"rows": "table", "shape": "before", "has_positions": True, "first": None},
    "sequence first": {"layout": "TBHD", "layout_of_k": "TBHD"},
    "sequence first, (T, 1, 1, R)": {"layout": "TBHD", "shape": "behind", "has_k": False},
    "sequence first, of each": {"layout": "TBHD", "layout_of_k": "TBHD", "rows": "of each", "first": None},
    "heads first": {"layout": "BHTD", "layout_of_k": "BHTD"},
    "heads first, (1, 1, T, R)": {"layout": "BHTD", "shape": "before", "has_k": False},
    "heads first, of each": {"layout": "BHTD", "rows": "of each", "first": None, "has_k": False},
    "heads of one sequence first": {"layout": "HTD", "layout_of_k": "HTD"},
    "heads of k first": {"layout_of_k": "BHTD"},
    "heads of q first": {"layout": "BHTD"},
    "heads in one dimension": {"layout": "BTM", "layout_of_k": "BTM"},
    "heads in one dimension, a weight": {"layout": "BTM", "has_k": False},
    "heads in one dimension, columns": {"layout": "BTM", "has_k": False, "has_weight": False},
    "heads in one dimension, rows": {"layout": "BTM", "has_k": False, "has_weight": False, "hq": 2},
    "heads of tokens in one dimension": {"layout": "TM", "has_k": False},
    "a part": {"rotary_dim": 4},
    "a part by pairs": {"rotary_dim": 4, "columns": 2},
    "a part of one sequence": {"layout": "THD", "layout_of_k": "THD", "rotary_dim": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_hint_leads_to_the_right_result(name):
    found = ends(made(random.Random(0), **PLAIN | OTHERS[name]))
    assert found and all(end.is_right and end.way for end in found)


TENSORS = rope_calls.case()


def assert_near(outputs, expected):
    torch.testing.assert_close([each.double() for each in outputs], [*expected], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_of_another_dtype(name):
    q, k, *weights, cos, sin = TENSORS
    tables = {"cos": cos, "sin": sin, name: {"cos": cos, "sin": sin}[name].double()}
    with pytest.raises(TypeError, match=rf"got torch.float64: pass {name}.float\(\)$"):
        qk_norm_rope(q, k, *weights, *tables.values())
    tables[name] = tables[name].float()
    outputs = qk_norm_rope(q, k, *weights, *tables.values(), eps=rope_calls.EPS)
    assert_near(outputs, rope_calls.expected(*TENSORS))


def test_complex_tables_have_no_hint():
    """float() of e^(i angle) is its cosine, for sin too."""
    q, k, *weights, cos, sin = TENSORS
    both = torch.complex(cos, sin)
    with pytest.raises(TypeError, match="^cos: expected torch.float32, got torch.complex64$"):
        qk_norm_rope(q, k, *weights, both, both)


def test_positions_of_another_dtype():
    tensors = rope_calls.case(tables="positions")
    positions = torch.tensor([7, 0, 3, 3, 1], device=DEVICE, dtype=torch.int16)
    with pytest.raises(TypeError, match=r"pass position_ids.long\(\)$"):
        qk_norm_rope(*tensors, position_ids=positions)
    outputs = qk_norm_rope(*tensors, position_ids=positions.long(), eps=rope_calls.EPS)
    assert_near(outputs, rope_calls.expected(*tensors, positions.long()))


def test_a_table_that_requires_grad():
    *tensors, cos, sin = TENSORS
    cos = cos.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"detach\(\) it"):
        qk_norm_rope(*tensors, cos, sin)
    outputs = qk_norm_rope(*tensors, cos.detach(), sin, eps=rope_calls.EPS)
    assert_near(outputs, rope_calls.expected(*TENSORS))


def test_one_tensor_is_for_rms_norm_rope():
    q, k, weight, _, cos, sin = TENSORS
    with pytest.raises(TypeError, match="rms_norm_rope takes one tensor"):
        qk_norm_rope(q, None, weight, None, cos, sin)
    y = rms_norm_rope(q, weight, cos, sin, eps=rope_calls.EPS)
    want, _ = rope_calls.expected(*TENSORS)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_no_hint_at_arguments_that_there_are_not():
    """rms_norm's eps speaks of a residual."""
    with pytest.raises(
        TypeError, match="^eps: expected a finite number, at least 0, or None, got a tensor of shape"
    ) as raised:
        qk_norm_rope(*TENSORS, eps=TENSORS[0])
    assert "residual" not in str(raised.value)


@pytest.mark.parametrize("is_recorded", [False, True], ids=["tables alone", "beside q"])
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_the_op_takes_no_tables_that_require_grad(name, is_recorded):
    """It would compute the other gradients, and none of theirs, in silence."""
    tables = {each: torch.ones(5, 8, device=DEVICE, requires_grad=each == name) for each in ("cos", "sin")}
    q = torch.ones(2, 5, 3, 8, device=DEVICE, requires_grad=is_recorded)
    numbers = 1e-6, 0.0, 8, False, "once", "end", None
    with pytest.raises(ValueError, match=f"{name}: expected a table without a gradient"):
        FORWARD(q, None, None, None, *tables.values(), None, *numbers)
