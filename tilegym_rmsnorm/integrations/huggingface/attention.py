# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rewrite attention, so that the norms of q and k run in one call with the rotary embedding.

Attention is rewritten where its forward has these statements, under whatever names:

    query = self.Q_NORM(...)                       maybe with .transpose(1, 2), also in a statement of its own
    key = self.K_NORM(...)                         both may stand in an `if` of their own, or in that of ROTARY
    query, key = ROTARY(query, key, cos, sin)      may stand in an `if`, with other statements

Q_NORM and K_NORM are patched norms, ROTARY is a function that rotary.py knows. The norms leave their statements, and
the one call of folding.py takes the place of ROTARY's. So a norm runs later than its statement. Nothing that it reads
may change in between: all code from the first norm to the rotation has to be such as unchanging.py lists.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from tilegym_rmsnorm.integrations.huggingface import harmless, rewriting
from tilegym_rmsnorm.integrations.huggingface.classes import PatchedType, subclass
from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.folding import folded
from tilegym_rmsnorm.integrations.huggingface.receivers import Receivers, receivers, uses
from tilegym_rmsnorm.integrations.huggingface.rotary import Rotary, read_rotary
from tilegym_rmsnorm.integrations.huggingface.source import Unclear
from tilegym_rmsnorm.integrations.huggingface.unchanging import Unchanging

_FOLDED, _HAS_NORMS = "tilegym_qk_norm_rope", "tilegym_has_norms"  # names that no attention has
_OTHER_CONDITIONS = "normalizes and rotates q and k under other conditions"


@dataclass(frozen=True)
class AttentionPatch:
    """Description from which a patched class is made, beside its base class: the names of the norms of q and k."""

    norms: tuple[str, ...]

    def fits(self, base: type) -> bool:
        return norms_of(base) == self.norms

    def made(self, base: type) -> PatchedType:
        found = _found(base)
        norms = [(norm.name, norm.is_turned) for norm in found.norms]
        helpers = {_FOLDED: folded(norms, found.rotary, found.receivers)}
        function = rewriting.compiled_again(base, _rewritten(found), helpers)
        return subclass(base, self, {"forward": function})


def norms_of(cls: type) -> tuple[str, ...]:
    """Return the names of the norms of q and k that a forward rotates. Raise `Unclear` where it cannot be rewritten."""
    return tuple(norm.name for norm in _found(cls).norms)


def check_module(module: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
    """Raise `Unclear` where a call of this module may change what its norms of q and k read before the rotation.
    is_norm: whether a child is a norm whose forward was read."""
    harmless.check_module(_found(type(module)).unchanging, module, is_norm)


class _Norm(NamedTuple):
    """Norm of q or k, where it stands."""

    name: str
    call: ast.Call
    block: list[ast.stmt]  # the statements among which it stands
    place: int  # of its statement, or of the `if` around that, among those before the rotation
    is_turned: bool


class _Found(NamedTuple):
    tree: ast.FunctionDef
    rotation: ast.Assign
    branch: ast.If | None  # in which the rotation stands
    norms: tuple[_Norm, _Norm]
    rotary: Rotary
    receivers: Receivers | None
    unchanging: Unchanging


def _found(cls: type) -> _Found:
    function, tree = rewriting.forward_and_tree(cls)
    for index, statement in enumerate(tree.body):
        branch = statement if isinstance(statement, ast.If) else None
        for place, rotation in enumerate([statement] if branch is None else branch.body):
            names = _names_rotated(rotation, function)
            if not names or not isinstance(rotation, ast.Assign) or not isinstance(rotation.value, ast.Call):
                continue
            before: list[tuple[ast.AST, list[ast.stmt]]] = [(each, tree.body) for each in tree.body[:index]]
            behind = tree.body[index + 1 :]
            if branch is not None:
                before += [(each, branch.body) for each in (branch.test, *branch.body[:place])]
                behind = [*branch.body[place + 1 :], *behind]
            query, key = (_norm_of(name, before) for name in names)
            rotary = _rotary_of(rotation.value, function)
            is_block = branch is None or query.block is tree.body or query.block is branch.body
            if query.block is not key.block or not is_block:
                raise Unclear(_OTHER_CONDITIONS)
            nodes, calls = [each for each, _ in before], [query.call, key.call]
            unchanging = Unchanging(cls, function, nodes, calls, rotation.value)
            of_whole = Unchanging(cls, function, tree.body, calls, rotation.value)
            for norm in (query, key):
                if not unchanging.is_child(norm.call):  # a property may do anything, and would do it later
                    raise Unclear(f"calls {norm.name}, which its class defines")
            for each in _between(nodes, (query, key), rotation.value):
                unchanging.check(each)
            receiving = receivers(function, behind, names, of_whole)
            return _Found(tree, rotation, branch, (query, key), rotary, receiving, unchanging)
    raise Unclear("has no statement q, k = ROTARY(q, k, cos, sin)")


def _names_rotated(statement: ast.stmt, function: FunctionType) -> tuple[str, ...]:
    """Return the names in `q, k = FUNCTION(q, k, cos, sin, ...)`; none for other statements."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return ()
    call, code = statement.value, function.__code__
    names = tuple(each.id for each in call.args[:2] if isinstance(each, ast.Name))
    if (
        list(map(ast.unparse, statement.targets)) != [f"({', '.join(names)})"]
        or len(set(names)) != 2
        or len(call.args) < 4
        or not isinstance(call.func, ast.Name)
        or call.func.id in (*code.co_varnames, *code.co_cellvars)
        or uses(names, *call.args[2:])
    ):
        return ()
    own = set(code.co_varnames) - set(code.co_cellvars)  # of others, other code would see q without its norm
    return names if own.issuperset(names) else ()


def _rotary_of(call: Any, function: FunctionType) -> Rotary:
    """Return the function that rotates, as it was read."""
    name, rotary = call.func.id, function.__globals__.get(call.func.id)
    try:
        given = [ast.literal_eval(each) for each in call.args[4:]]
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except ValueError:
        given, named = [], {None: None}
    if None in named or any(isinstance(each, ast.Starred) for each in call.args):
        raise Unclear(f"calls {name} with arguments that are not read")
    try:
        return read_rotary(rotary, given, named)
    except Unclear as error:
        raise Unclear(f"calls {name}, which {error}") from None


def _norm_of(name: str, before: list[tuple[Any, list[ast.stmt]]]) -> _Norm:
    """Return the norm of q or k, by its name, from the nodes before the rotation, each with the block it stands in."""
    is_turned = False
    using = [(place, *each) for place, each in enumerate(before) if uses([name], each[0])][::-1]
    for place, node, own in using:
        block = own
        is_if = isinstance(node, ast.If) and len(node.body) == 2 and not node.orelse
        if is_if and not uses([name], node.test):
            block = node.body
            node = block[uses([name], block[1])]
        target, value = rewriting.assigned(node)
        while (inner := _transposed(value)) is not None:
            value, is_turned = inner, not is_turned
        norm, _ = rewriting.child_and_argument(value)
        if target == name and norm and isinstance(value, ast.Call):
            if using[0][2] is not own:  # it is transposed in the `if` of the rotation alone
                raise Unclear(_OTHER_CONDITIONS)
            return _Norm(norm, value, block, place, is_turned)
        if not (target == name and isinstance(value, ast.Name) and value.id == name and block is own):
            raise Unclear(f"rotates {name}, which no norm returned as it is: {text_of_node(node)}")
    raise Unclear(f"rotates {name}, which no norm returned")


def _transposed(node: ast.expr | None) -> ast.expr | None:
    """Return e of `e.transpose(1, 2)` or `e.permute(0, 2, 1, 3)`; None of anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = ast.unparse(ast.Call(ast.Name(node.func.attr), node.args, node.keywords))
        if text in ("transpose(1, 2)", "permute(0, 2, 1, 3)"):
            return node.func.value
    return None


def _between(before: list[ast.AST], norms: tuple[_Norm, _Norm], rotation: Any) -> Iterator[ast.AST]:
    """Yield what runs from the first norm on up to the rotation. before: the nodes before the rotation."""
    first, second = sorted(norms, key=lambda norm: (norm.place, norm.call.lineno, norm.call.col_offset))
    if first.place == second.place:  # in the same `if`
        yield second.call
    yield from before[first.place + 1 :]
    yield from rotation.args[2:]


def _rewritten(found: _Found) -> ast.FunctionDef:
    tree, rotation, branch, norms = copy.deepcopy(found[:4])  # others read the tree that was found
    call: Any = rotation.value
    cache = found.receivers.cache if found.receivers is not None else ""
    more = [_loaded("self"), _loaded(cache) if cache else ast.Constant(None)]
    new: ast.expr = ast.Call(_loaded(_FOLDED), [*more, call.func, *call.args], call.keywords)
    block = norms[0].block
    if branch is not None and block is tree.body:
        names = [each.id for each in call.args[:2]]
        branch.orelse[:0] = map(_unrotated, names, norms)
        for each in branch.orelse[:2]:
            rewriting.replacing(rotation, each)
    elif branch is None and block is not tree.body:
        index, owner = next(
            (index, each) for index, each in enumerate(tree.body) if getattr(each, "body", None) is block
        )
        assert isinstance(owner, ast.If)
        # The condition is evaluated once, where it stood. So is its truth, for which __bool__ may run any code.
        is_true = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), owner.test))
        kept = ast.Assign([ast.Name(_HAS_NORMS, ast.Store())], is_true)
        tree.body.insert(index, ast.copy_location(kept, owner))
        owner.test = _loaded(_HAS_NORMS)
        new = ast.IfExp(_loaded(_HAS_NORMS), new, call)
    rewriting.replacing(call, new)
    rotation.value = new
    _Without([norm.call for norm in norms]).visit(tree)
    return tree


def _loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _unrotated(name: str, norm: _Norm) -> ast.stmt:
    """Return the statement of a norm that no rotation follows."""
    x, back = (f"{name}.transpose(1, 2)", ".transpose(1, 2)") if norm.is_turned else (name, "")
    return ast.parse(f"{name} = self.{norm.name}({x}){back}").body[0]


class _Without(ast.NodeTransformer):
    """Put the argument of each of these calls in its place."""

    def __init__(self, calls: list[ast.Call]) -> None:
        self.calls = calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.visit(node.args[0]) if node in self.calls else self.generic_visit(node)


def rotates(cls: type) -> bool:
    """Return whether a forward calls a function whose name is that of a rotary embedding."""
    return any("apply" in name and ("rot" in name or "rope" in name) for name in rewriting.names_read_by(cls))
