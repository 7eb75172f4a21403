# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Recognize code that changes nothing but local names: no tensor, module, container or mode.

A norm that runs later than its statement computes the same where only such code runs in between. All of it is:

    statements    name = E    a, *b = E    name: T = E    E    pass    break    continue    assert E
                  return ...    raise ...                    the norm's result is dropped
                  if E: ...    for a, b in E: ...            and their else
    expressions   names, constants, displays, comprehensions of lists and generators, operators, f-strings,
                  E[E], E if E else E
                  E.shape, and the other attributes in _ATTRIBUTES
                  E.view(...), and the other methods in _METHODS
                  torch.cat(...), and the other functions in _FUNCTIONS
                  self.NAME, self.NAME.OTHER                 a number, a string, a tensor, or a list of such
                  self.NAME(...)                             a module that leaves its input as it is

The last two are known of a module alone, by harmless.py. Operands, objects of methods, arguments of functions and
iterables must be values that were made in these ways, or arguments of the forward: others may run anything.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Collection, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.rewriting import called_child
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

_ATTRIBUTES = frozenset("device dtype H imag is_cuda itemsize mH mT ndim real requires_grad shape T".split())
# Methods of tensors that return new tensors, views and numbers. Other objects may have such methods, too, and modules
# change themselves by casts: so the object has to be known.
_METHODS = frozenset(
    "abs argmax bfloat16 bmm broadcast_to chunk clamp clone contiguous cos cpu cuda detach diff dim div double "
    "exp expand expand_as flatten float half is_contiguous is_floating_point item log masked_fill matmul max "
    "mean min movedim mul narrow neg new_full new_ones new_zeros norm numel permute pow reciprocal repeat "
    "repeat_interleave reshape roll rsqrt select sigmoid sin size softmax split split_with_sizes sqrt square "
    "squeeze stride sub sum swapaxes tanh tensor_split to tolist transpose tril triu type type_as unbind "
    "unflatten unfold unsqueeze view view_as where".split()
)
_ITERATING = frozenset([enumerate, list, max, min, sum, tuple, zip])
_TORCH = (
    "arange broadcast_to cat chunk clamp concat cos exp flatten full is_grad_enabled matmul maximum mean minimum "
    "movedim mul ones ones_like outer permute pow rand rand_like randn repeat_interleave reshape rsqrt sigmoid sin "
    "softmax split square squeeze sqrt stack sum tanh tensor transpose tril triu unbind unsqueeze where zeros "
    "zeros_like"
)
_FUNCTIONS: frozenset[Any] = _ITERATING | {abs, bool, float, id, int, len, range, slice, str}
_FUNCTIONS |= {functional.pad, functional.softmax, *(getattr(torch, name) for name in _TORCH.split())}
_NOT_GIVEN = frozenset([None, "out", "inplace", "key"])  # by name, or in **named
_OPERATORS: tuple[Any, ...] = ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp
_OPERATORS += ast.Subscript, ast.Slice, ast.FormattedValue


class Unchanging:
    """Check of the code of one method, whose first parameter is self.

    Args:
        cls: The class of the method.
        function: The method.
        statements: Those of its tree that may run before the code ends, and tests of an `if` around it.
        norms: Calls of norms that run later. Each counts as if its one argument stood in its place.
        rotation: The call that returns q and k rotated.
    """

    def __init__(
        self,
        cls: type,
        function: FunctionType,
        statements: Sequence[ast.AST],
        norms: Collection[ast.Call],
        rotation: ast.Call,
    ) -> None:
        self.cls, self.function, self.norms = cls, function, norms
        self.tensors = [rotation]  # calls that return tensors
        code = function.__code__
        self.locals = {*code.co_varnames, *code.co_cellvars} - {"self"}
        # Without **kwargs, a dictionary of its own, to which the forward may add anything, and without those that
        # have an object as their default.
        self.parameters = {
            name
            for name, each in inspect.signature(function).parameters.items()
            if each.kind is not each.VAR_KEYWORD and (each.default is each.empty or is_inert(each.default))
        } - {"self"}
        self.values = _values(statements)
        self.added_to = _added_to(statements)
        self.asked: set[str] = set()  # names whose values are being looked at
        self.called: set[str] = set()  # children that the code calls
        self.returning: set[str] = set()  # children whose results it uses
        self.read: set[tuple[str, ...]] = set()  # attributes of self that it reads

    def check(self, node: ast.AST) -> None:
        """Raise `Unclear` where a statement or an expression may change anything."""
        if not self.is_unchanging(node):
            raise Unclear(f"may change something between a norm and its rotation: {text_of_node(node)}")

    def is_unchanging(self, *nodes: ast.AST | None) -> bool:
        return all(self._is_one_unchanging(node) for node in nodes if node is not None)

    def _is_safe(self, *nodes: ast.expr) -> bool:
        """Return whether expressions change nothing and have values of which operations change nothing."""
        return self._is_known(*nodes) and self.is_unchanging(*nodes)

    def _is_one_unchanging(self, node: ast.AST) -> bool:
        if isinstance(node, ast.stmt):
            return self._statement(node)
        if isinstance(node, ast.Name):
            is_local = node.id in self.locals or node.id in self.values
            return is_local or (node.id != "self" and self._is_constant(node))
        if isinstance(node, ast.Attribute):
            is_read = self._reads(node) or self._is_constant(node)
            return is_read or (node.attr in _ATTRIBUTES and self._is_safe(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            is_listed = all(
                _are_names(each.target) and not each.is_async and self._is_safe(each.iter, *each.ifs)
                for each in node.generators
            )
            return is_listed and self.is_unchanging(node.elt)
        inside = _operands(node)
        if isinstance(node, (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr)) or (
            isinstance(node, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
        ):
            return self.is_unchanging(*inside)
        return isinstance(node, (*_OPERATORS, ast.Starred)) and self._is_safe(*inside)

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return self.is_unchanging(node.value) and all(
                self._binds(each, node.value) for each in node.targets
            )
        if isinstance(node, ast.AnnAssign):  # annotations of local names are not evaluated
            is_name = isinstance(node.target, ast.Name) and node.value is not None
            return is_name and self._binds(node.target, node.value) and self.is_unchanging(node.value)
        if isinstance(node, ast.If):
            return self._is_known(node.test) and self.is_unchanging(node.test, *node.body, *node.orelse)
        if isinstance(node, ast.For):
            is_bound = self._is_known(node.iter) and self._binds(node.target, node.iter)
            return is_bound and self.is_unchanging(node.iter, *node.body, *node.orelse)
        if isinstance(node, ast.Expr):
            return self.is_unchanging(node.value)
        if isinstance(node, ast.Assert):
            return self._is_safe(node.test)
        return isinstance(node, (ast.Pass, ast.Break, ast.Continue, ast.Return, ast.Raise))

    def _binds(self, target: ast.expr, value: ast.expr | None) -> bool:
        """Return whether an assignment binds local names alone, and runs no iterator."""
        if isinstance(target, ast.Name):
            return target.id in self.locals
        if isinstance(target, ast.Starred):
            return self._binds(target.value, value)
        is_several = isinstance(target, (ast.Tuple, ast.List)) and value is not None and self._is_known(value)
        return is_several and all(self._binds(each, value) for each in target.elts)  # type: ignore[attr-defined]

    def _reads(self, node: ast.expr) -> bool:
        """Return whether an expression is self.NAME or self.NAME.OTHER, and no property."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id != "self" or len(names) not in (1, 2):
            return False
        self.read.add(tuple(names))
        return not hasattr(inspect.getattr_static(self.cls, names[0], None), "__get__")

    def _call(self, node: ast.Call) -> bool:
        if node in self.norms:
            return self.is_unchanging(*node.args)
        given = [*node.args, *(word.value for word in node.keywords)]
        if not self.is_unchanging(*given) or not _NOT_GIVEN.isdisjoint(word.arg for word in node.keywords):
            return False
        if called_child(node):
            self.called.add(called_child(node))
            return self.is_child(node)
        called = self._global(node.func)
        if _is_one_of(called, _FUNCTIONS):
            return self._is_known(*given)
        if called is not None or not isinstance(node.func, ast.Attribute):
            return False
        return node.func.attr in _METHODS and self._is_safe(node.func.value)

    def _global(self, node: ast.expr) -> Any:
        """Return the value of a global name, of a builtin, or of a name in a module; None of anything else."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            return self.function.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            scope = self._global(node.value)
            return getattr(scope, node.attr, None) if isinstance(scope, ModuleType) else None
        return None

    def _is_constant(self, node: ast.expr) -> bool:
        """Return whether a node is a global number, string or dtype, such as torch.float32."""
        value = self._global(node)
        return value is not None and is_inert(value)

    def _is_known(self, *nodes: ast.expr) -> bool:
        """Return whether values of expressions are tensors, numbers, strings, or what has only such items: operators,
        methods and iterations of these change nothing. Arguments of the forward are taken for such."""
        return all(map(self._is_one_known, nodes))

    def _is_one_known(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            if node.id in self.added_to:
                return False
            if node.id in self.asked:  # bound from itself: its other values decide
                return True
            self.asked.add(node.id)
            values = self.values.get(node.id, [] if node.id in self.parameters else [None])
            # Items of a list that has a name may be replaced.
            known = [value for value in values if value is not None and not self._is_list(value)]
            result = len(known) == len(values) and self._is_known(*known)
            self.asked.remove(node.id)
            return result
        if isinstance(node, ast.Attribute):
            is_read = self._is_constant(node) or self._reads(node)
            return is_read or (node.attr in _ATTRIBUTES and self._is_known(node.value))
        if isinstance(node, (*_OPERATORS, ast.Tuple, ast.List, ast.Starred)):
            return self._is_known(*_operands(node))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            is_lazy = isinstance(node, ast.GeneratorExp)
            parts = (node.elt, *(each.iter for each in node.generators))
            return self._is_known(*parts) and (not is_lazy or self.is_unchanging(node))
        if isinstance(node, ast.Call):
            called = self._global(node.func)
            if node in self.tensors or node in self.norms:
                return True
            if self.is_child(node):
                self.returning.add(called_child(node))
                return True
            if _is_one_of(called, _ITERATING):
                return self._is_known(*node.args)
            if isinstance(node.func, ast.Attribute) and called is None:
                return node.func.attr in _METHODS and self._is_known(node.func.value)
            return _is_one_of(called, _FUNCTIONS)
        return isinstance(node, (ast.Constant, ast.JoinedStr))

    def _is_list(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "tolist"
            return is_method or self._global(node.func) is list
        if isinstance(node, (*_OPERATORS, ast.Tuple)):
            return any(map(self._is_list, _operands(node)))
        return isinstance(node, (ast.List, ast.ListComp))

    def is_child(self, node: ast.Call) -> bool:
        """Return whether a call is self.NAME(...), and NAME is no method."""
        child = called_child(node)
        return bool(child) and inspect.getattr_static(self.cls, child, None) is None


def _operands(node: ast.AST) -> list[ast.expr]:
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]


def _are_names(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_are_names, target.elts))
    return isinstance(target, ast.Name)


def _is_one_of(value: Any, known: frozenset[Any]) -> bool:
    try:
        return value is not None and value in known
    except TypeError:  # not hashable
        return False


def _added_to(statements: Sequence[ast.AST]) -> set[str]:
    """Return the names of objects that have a method called which may put anything into them, as list.append does."""
    return {
        each.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr not in _METHODS
        for each in ast.walk(node.func.value)
        if isinstance(each, ast.Name)
    }


def _values(statements: Sequence[ast.AST]) -> dict[str, list[ast.expr | None]]:
    """Return the values that statements bind to each name, or to one of several at once. None: any value."""
    values: dict[str, list[ast.expr | None]] = {}
    seen: set[ast.AST] = set()

    def bind(target: ast.expr, value: ast.expr | None) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Starred):
                bind(each.value, None)  # a list
            elif isinstance(each, ast.Name):  # itself, or an item of it is assigned
                seen.add(each)
                is_bound = isinstance(each.ctx, ast.Store)
                values.setdefault(each.id, []).append(value if is_bound else None)

    nodes = [node for statement in statements for node in ast.walk(statement)]
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            bind(node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            bind(node.target, node.iter)
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in seen:
            bind(node, None)  # of `with`, `:=` and the like
        else:  # of imports, handlers of errors, functions inside and patterns
            for field in ("name", "asname", "rest"):
                if isinstance(name := getattr(node, field, None), str):
                    values.setdefault(name, []).append(None)
    return values


def is_inert(value: Any) -> bool:
    """Return whether reading a value, or an item of it, runs no code."""
    if isinstance(value, (list, tuple)):
        return all(map(is_inert, value))
    if isinstance(value, dict):
        return all(map(is_inert, value.values()))
    kinds = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device)
    return value is None or isinstance(value, kinds)
