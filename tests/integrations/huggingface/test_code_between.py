# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Code between the norms of q and k and their rotation, where the norms run once attention is folded: attention folds
where that code is known to change nothing, and else keeps its statements."""

import functools
import operator

import pytest
import torch
from attention_classes import Attention as WithoutValues
from attention_classes import D, N, given
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

from tilegym_rmsnorm import patch_model


class Changing:
    """Changes what methods of these names leave as it is, if a tensor has them."""

    @staticmethod
    def split(x):
        return x.mul_(1.5).add_(1.0)

    clone = norm = split

    def __getitem__(self, x):
        return x.mul_(1.5).add_(1.0)

    __matmul__ = __getitem__

    def __len__(self):
        held_by_changing[0].variance_epsilon = 1.0
        return 1


held_by_changing = [None]


class Plain:
    """An object whose property changes a norm."""

    def __init__(self, norm):
        self.norm = norm

    @property
    def step(self):
        self.norm.variance_epsilon = 1.0
        return 1.0


class Block(Changing, nn.Module):
    pass


class Linear(nn.Linear):
    """A projection that changes its input."""

    def forward(self, x):
        return super().forward(x.mul_(1.5).add_(1.0))


class Attention(WithoutValues):
    def __init__(self):
        super().__init__()
        self.v_proj, self.changing, self.wide = nn.Linear(N, 2 * D), Linear(N, 2 * D), nn.Linear(N, 8 * D)
        self.drop, self.same, self.relu = nn.Dropout(0.0), nn.Identity(), nn.ReLU(inplace=True)
        self.other, self.third = nn.Module(), LlamaRMSNorm(D)
        self.other.first, self.other.second = LlamaRMSNorm(D), LlamaRMSNorm(D)
        with torch.no_grad():
            self.third.weight.fill_(3.0), self.other.first.weight.fill_(9.0)
        self.block = Block()
        self.settings, held_by_changing[0] = Plain(self.first), self.first
        self.scale, self.steps, self.is_on = 2.0, [1, 2], True

    @property
    def T(self):
        self.first.weight.data.mul_(2)
        return 1.0

    @property
    def doubled(self):
        self.first.weight.data.mul_(2)
        return 1.0

    def changed(self, x):
        return x.mul_(2).add_(1)

    def chosen(self):
        return self.first

    def toggled(self):
        self.first.variance_epsilon = 1.0
        return True


SOURCE = """
def forward(self, x, tables, flag=True, *others, held=changing, **kwargs):
    cos, sin = tables
    shape = (*x.shape[:-1], -1, 8)
    q = self.q_proj(x).view(shape)
    k = self.k_proj(x).view(shape)
    v = self.v_proj(x).view(shape).transpose(1, 2)
BEFORE
    q = self.first(q).transpose(1, 2)
    k = self.second(k).transpose(1, 2)
BETWEEN
    q, k = apply_rotary(q, k, cos, sin)
AFTER
    return q, k, v
"""


def source(between="", before="", after=""):
    lines = {"BETWEEN": between, "BEFORE": before, "AFTER": after}
    text = SOURCE
    for name, code in lines.items():
        text = text.replace(name, "".join(f"    {line}\n" for line in code.splitlines()))
    return text


def helper(x):
    return x


def peek(name):
    return globals_of[0][name].mean()


globals_of = [{}]
SCOPE = {
    "nn": nn,
    "F": nn.functional,
    "functools": functools,
    "operator": operator,
    "helper": helper,
    "peek": peek,
    "Changing": Changing,
    "changing": Changing(),
}


def results(cls, patched, dtype, is_training, autocast):
    """Outputs and gradients of two calls, or the error, and the report."""
    module = cls().to(dtype).train(is_training)
    report = patch_model(module, patch_layers=True, backend="torch") if patched else None
    globals_of[0] = cls.forward.__globals__
    outputs = []
    for _ in range(2):
        arguments = given(dtype)
        x = arguments["x"].requires_grad_(is_training)
        arguments.update(x=x + 0, tables=[*arguments["tables"]])
        torch.manual_seed(0)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(is_training):
                y = module(**arguments)
            total = sum((each.float() * torch.randn(each.shape)).sum() for each in y)
            leaves = [x, *module.parameters()]
            gradients = torch.autograd.grad(total, leaves, allow_unused=True) if is_training else ()
            outputs.append([*y, *gradients])
        except RuntimeError as error:
            outputs.append(str(error))
        finally:
            torch.set_grad_enabled(True)
    return outputs, report


MODES = [(torch.float32, False, False), (torch.bfloat16, True, False), (torch.float32, True, True)]


def assert_patched_computes_the_same(cls, is_folded):
    for mode in MODES:
        (expected, _), (ours, report) = (results(cls, patched, *mode) for patched in (False, True))
        assert bool(report.attention) == is_folded, report
        for one, other in zip(ours, expected, strict=True):
            if isinstance(one, str) or isinstance(other, str):
                # A norm that runs alone may refuse an input that is changed later, whatever attention does.
                assert isinstance(one, str) and not is_folded
                continue
            for mine, theirs in zip(one, other, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.dtype is theirs.dtype and mine.requires_grad == theirs.requires_grad
                    tolerance = 1e-5 if mode[0] is torch.float32 and not mode[2] else 2e-2
                    assert (mine.float() - theirs.float()).norm() <= tolerance * theirs.float().norm() + 1e-6
    return report


KNOWN = {
    "nothing": source(),
    "views": source("v = v.transpose(1, 2).reshape(*x.shape[:2], 2, 8).permute(0, 2, 1, 3)"),
    "projection": source("w = self.v_proj(x).view(shape)\nv = v + w.transpose(1, 2)"),
    "splits": source("a, b = v.chunk(2, 1)\nv = torch.cat((b, a), dim=1)"),
    "starred target": source("a, *_ = v.unbind(1)\nv = torch.stack((a, a), 1)"),
    "unpacking": source("cos, sin = tables"),
    "casts of what is known": source("cos, sin = cos.to(v.dtype), sin.type_as(v)\nv = v.float().to(v.dtype)"),
    "operators": source("v = v * self.scale + (-v if flag and not others else v @ v.mT @ v)"),
    "raw values of other names": source(before="", between="").replace(
        "q = self.first(q)", "q = self.first(raw := q)"
    ),
    "read of an input of a norm": source("v = v + raw.mean()", before="raw = q"),
    "an input of a norm is bound anew": source("raw = raw * 2\nv = v + raw.mean()", before="raw = q"),
    "same norm besides": source("v = self.first(v)"),
    "another norm": source("v = self.third(v)"),
    "identity": source("w = self.same(raw)\nv = v + w.mean()", before="raw = q"),
    "if": source("if self.is_on:\n    v = v * 2\nelse:\n    v = v * 3"),
    "for": source("for i, step in enumerate(self.steps):\n    if i:\n        continue\n    v = v * step"),
    "comprehension": source("v = sum([each * 2 for each in (v, v) if flag])"),
    "return": source("if not flag:\n    return self.changed(x)"),
    "raise": source("if v is None:\n    raise ValueError(f'{v.shape}')"),
    "assert": source("assert v.shape[-1] == 8, self.toggled()"),
    "generator": source("a, b = both\nv = a + b", before="both = (each[:, :2] for each in (q, q))"),
    "generator bound to what it iterates": source(
        "cos, sin = tables", before="tables = (x[:1] for x in tables)"
    ),
    "dictionary": source("options = {'sin': sin, 'cos': cos}\nv = v * len(cos)"),
    "annotated": source("w: torch.Tensor = v * 2\nv = w").replace(
        "q = self.first", "q: torch.Tensor = self.first"
    ),
    "permute": source().replace("self.first(q).transpose(1, 2)", "self.first(q).permute(0, 2, 1, 3)"),
    "casts before norms": source()
    .replace("first(q)", "first(q.float())")
    .replace("second(k)", "second(k.float())"),
    "heads last but one": source(after="q, k = q.transpose(1, 2), k.transpose(1, 2)")
    .replace("first(q).transpose(1, 2)", "first(q)")
    .replace("second(k).transpose(1, 2)", "second(k)")
    .replace("cos, sin)\n    q", "cos, sin, unsqueeze_dim=2)\n    q"),
    "changes behind the rotation": source(after="q = q * 1\nq *= 2"),
}
ALIASES = {  # how `raw` comes to share memory with q
    "name": "raw = q",
    "unary plus": "raw = +q",
    "as_tensor": "raw = torch.as_tensor(q)",
    "positive": "raw = torch.positive(q)",
    "eval dropout": "raw = torch.dropout(q, 0.0, False)",
    "resolve_conj": "raw = q.resolve_conj()",
    "identity": "raw = self.same(q)",
    "list": "(raw,) = [each for each in (q,)]",
    "dictionary": "raw = {'q': q}['q']",
    "dict()": "raw = dict(q=q)['q']",
    "lambda": "raw = (lambda each: each)(q)",
    "helper": "raw = helper(q)",
    "attribute": "self.last = q\nraw = self.last",
    "base": "both = torch.stack((q, q))\nq = [each for each in both][0]\nraw = both",
    "map": "both = torch.stack((q, q))\nq, _ = map(lambda each: each, both)\nraw = both",
}
CHANGES = {  # of `raw`
    "augmented": "raw += 1",
    "item": "raw[0] = 1.0",
    "item of a list": "[raw][0].add_(1)",
    "method": "raw.add_(1)",
    "out": "torch.exp(raw, out=raw)",
    "data": "raw.data.add_(1)",
    "dunder": "raw.__iadd__(1)",
    "setitem": "raw.__setitem__(0, 1.0)",
    "getattr": "getattr(raw, 'add_')(1)",
    "operator": "operator.iadd(raw, 1)",
    "relu by position": "w = F.relu(raw, True)",
    "relu by keyword": "w = F.relu(raw, inplace=True)",
    "dropout by position": "w = F.dropout(raw, 0.5, True, True)",
    "module in place": "w = self.relu(raw)",
    "module that changes its input": "w = self.changing(raw.flatten(2))",
    "method of the class": "w = self.changed(raw)",
    "foreach": "torch._foreach_add_([raw], 1)",
    "numpy": "raw.detach().float().numpy().fill(1)",
    "storage": "raw.untyped_storage().fill_(0)",
    "with": "with torch.no_grad() as _:\n    raw.add_(1)",
    "attribute": "self.last = raw\nself.last += 1",
    "alias of what changes": "w = self.drop(raw)\nw += 1",
    "inner function": "def go():\n    raw.add_(1)\ngo()",
    "comprehension": "[each.add_(1) for each in (raw,)]",
    "generator": "any(each.add_(1).sum() > 0 for each in (raw,))",
    "walrus": "(w := raw).add_(1)",
    "static method": "w = Changing.split(raw)",
    "method of a global object": "w = changing.clone(raw)",
    "method of a module": "w = self.block.norm(raw)",
    "method of what a function returns": "w = helper(changing).norm(raw)",
}
OTHERS = {  # changes of something else: before the norms, and between
    "an iterator unpacked": ("both = (each.add_(1) for each in (q, k))", "a, b = both"),
    "an iterator in a list": ("both = map(lambda each: each.add_(1), (q, k))", "a = list(both)"),
    "an iterator searched": ("both = (each.add_(1) is None for each in (q, k))", "a = True in both"),
    "an iterator starred": ("both = (each.add_(1) for each in (q, k))", "a = [*both]"),
    "an iterator in for": ("both = (each.add_(1) for each in (q, k))", "for a in both:\n    pass"),
    "grad mode": ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    "autocast": ("", "torch.set_autocast_enabled('cpu', False)"),
    "weight": ("", "self.first.weight.data.mul_(2)"),
    "alias of a weight": ("scale = self.first.weight.data", "scale.mul_(2)"),
    "alias of a norm": ("norm = self.first", "norm.variance_epsilon = 1.0"),
    "cast of a norm": ("norm = self.first", "norm.double()"),
    "cast of a norm in a list": ("(norm, *_) = list(self.children())[2:]", "norm.double()"),
    "cast by the dictionary": ("", "w = self._modules['first'].double()"),
    "children": ("", "for each in self.children():\n    each.variance_epsilon = 0.5"),
    "parameters": ("", "for each in self.parameters():\n    each.data.mul_(2)"),
    "modules": ("", "self._modules['first'], self._modules['third'] = self.third, self.first"),
    "swap": ("", "self.first, self.second = self.second, self.first"),
    "setattr": ("", "setattr(self, 'first', self.third)"),
    "self": ("me = self", "self = self.other"),
    "target of a comprehension": ("", "w = [0 for self.first.variance_epsilon in (1.0,)]"),
    "target of a generator": ("", "w = sum(0 for (self.first.variance_epsilon, _) in ((1.0, 0),))"),
    "item of an object": ("raw = q", "w = changing[raw]"),
    "operator of an object": ("raw = q", "w = changing @ raw"),
    "operator of an object that a name holds": ("raw, held = q, changing", "w = held @ raw"),
    "length of an object": ("held = helper(changing)", "w = len(held)"),
    "truth of an object": ("held = helper(changing)", "w = 1 if held else 2"),
    "property of an object": ("", "v = v * self.settings.step"),
    "property by another name": ("me = self", "w = me.T"),
    "cast by another name": ("me = self", "me.double()"),
    "cast by an item": ("me = (self, self)", "me[0].double()"),
    "item that was replaced": ("norms = [1]\nnorms[0] = self.first", "norms[0].double()"),
    "item that was added": ("norms = [1]\nnorms.append(self.first)", "norms[1].double()"),
    "item added to a sum of lists": ("norms = [1] + [2]\nnorms.append(self.first)", "norms[2].double()"),
    "item added to a list in a tuple": (
        "norms = ([1], 2)\nnorms[0].append(self.first)",
        "norms[0][1].double()",
    ),
    "item added to an argument": ("tables.append(self.first)", "tables[2].double()"),
    "item added to an attribute": ("steps = self.steps\nsteps.append(self.first)", "steps[-1].double()"),
    "default that is an object": ("raw = q", "w = held.norm(raw)"),
    "keyword that was added": ("kwargs['norm'] = self.first", "kwargs['norm'].double()"),
    "iterator that replaced an item": (
        "both = [1]\nboth[0] = (each.add_(1) for each in (q,))",
        "for each in both[0]: pass",
    ),
    "iterator that is a keyword": ("kwargs['it'] = (each.add_(1) for each in (q,))", "(w,) = kwargs['it']"),
    "method of a module that a name holds": ("raw, block = q, self.block", "w = block.norm(raw)"),
    "method of an object that a name holds": ("raw, held = q, changing", "w = held.norm(raw)"),
    "property": ("", "v = v * self.doubled"),
    "method": ("", "v = v * self.toggled()"),
    "condition": ("", "if self.toggled():\n    v = v * 2"),
    "frame": ("import sys", "v = v + sys._getframe().f_locals['q'].mean()"),
    "key function": ("see = lambda each: self.toggled()", "w = max([1, 2], key=see)"),
    "try": ("", "try:\n    v.add_(1)\nexcept ValueError:\n    pass"),
    "cast of a norm in a display": ("norms = [self.first] + [self.second]", "norms[0].half()"),
    "cast of a norm in a comprehension": ("norms = [each for each in self.children()]", "norms[2].half()"),
    "cast of a norm from a method": ("norm = self.chosen()", "norm.half()"),
}


def made(class_of, text, rotary=apply_rotary_pos_emb):
    return class_of(text, base=Attention, apply_rotary=rotary, **SCOPE)


@pytest.mark.parametrize("text", KNOWN.values(), ids=KNOWN)
def test_code_that_changes_nothing(class_of, text):
    assert_patched_computes_the_same(made(class_of, text), True)


@pytest.mark.parametrize(
    ("alias", "change"),
    [
        *((alias, CHANGES["method"]) for alias in ALIASES.values()),
        *((ALIASES[name], change) for name in ("name", "unary plus") for change in CHANGES.values()),
        *zip(ALIASES.values(), reversed(CHANGES.values()), strict=False),
    ],
)
def test_an_input_of_a_norm_is_changed(class_of, alias, change):
    cls = made(class_of, source(change, before=alias))
    report = patch_model(cls(), patch_layers=True)
    assert not report.attention
    reasons = " ".join(each.reason for each in report.declined)
    assert "between a norm and its rotation" in reasons or "its input is changed in place" in reasons


@pytest.mark.parametrize("before_and_between", OTHERS.values(), ids=OTHERS)
def test_something_else_is_changed(class_of, before_and_between):
    before, between = before_and_between
    cls = made(class_of, source(between, before=before))
    report = assert_patched_computes_the_same(cls, False)
    known = "between a norm and its rotation", "binds self to something else"
    assert any(text in each.reason for each in report.declined for text in known)


def test_arguments_of_the_rotation_are_code_between(class_of):
    text = source().replace("apply_rotary(q, k, cos, sin)", "apply_rotary(q, k, self.toggled() * cos, sin)")
    assert_patched_computes_the_same(made(class_of, text), False)


def test_names_that_other_code_sees(class_of):
    text = source("v = v + peek('q')").replace(
        "    cos, sin = tables", "    global q\n    cos, sin = tables", 1
    )
    report = assert_patched_computes_the_same(made(class_of, text), False)
    assert report.declined[-1].reason.endswith("has no statement q, k = ROTARY(q, k, cos, sin)")


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x.mul_(1.5).add_(1.0))


def with_another_forward(linear):
    forward = linear.forward
    linear.forward = functools.wraps(forward)(lambda x: forward(x.mul_(1.5).add_(1.0)))
    return linear


class WithProperty(nn.Linear):
    @property
    def bias(self):
        return None


def with_property(linear):
    del linear._parameters["bias"]
    linear.__class__ = WithProperty
    return linear


def hooked_by_accelerate(linear):
    hooks = pytest.importorskip("accelerate.hooks")

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, x):
            return (x.mul_(1.5).add_(1.0),), {}

    return hooks.add_hook_to_module(linear, Hook())


class Adapted(nn.Module):
    """A projection with another in it, as of peft."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


AdaptedLinear = type(
    "Linear", (Adapted,), {"__module__": "peft.layer", "forward": lambda self, x: self.base_layer(x)}
)


@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("v_proj", Called(N, 2 * D)),
        ("v_proj", with_property(nn.Linear(N, 2 * D))),
        ("v_proj", hooked_by_accelerate(nn.Linear(N, 2 * D))),
        ("v_proj", with_another_forward(nn.Linear(N, 2 * D))),
        ("v_proj", AdaptedLinear(Linear(N, 2 * D))),
        ("v_proj", Linear(N, 2 * D)),
        ("v_proj", nn.Sequential(nn.ReLU(inplace=True), nn.Linear(N, 2 * D))),
        ("third", nn.LayerNorm(D)),
    ],
)
def test_children_that_are_called_between(class_of, name, child):
    module = made(class_of, source("w = self.v_proj(x)\nv = self.third(v)"))()
    module.add_module(name, child)
    report = patch_model(module, patch_layers=True)
    is_known = name == "third"
    assert bool(report.attention) == is_known
    if not is_known:
        text = f"its forward calls v_proj between a norm and its rotation, and a {type(child).__name__} may change"
        assert report.declined[-1].reason.startswith(text)


@pytest.mark.parametrize("name", ["v_proj", "third"])
def test_hooks_of_children_that_are_called_between(class_of, name):
    module = made(class_of, source("w = self.v_proj(x)\nv = self.third(v)"))()
    getattr(module, name).register_forward_pre_hook(lambda module, given: given[0].add_(1))
    assert not patch_model(module, patch_layers=True).attention


def test_attributes_that_are_read_between(class_of):
    cls = made(class_of, source("if self.scale:\n    v = v * 2"))
    assert patch_model(cls(), patch_layers=True).attention
    module = cls()
    module.scale = (each for each in [1])
    report = patch_model(module, patch_layers=True)
    assert report.declined[-1].reason == "its forward reads scale between a norm and its rotation"


def test_a_class_that_finds_children_by_itself(class_of):
    cls = made(class_of, source())
    cls.__getattr__ = lambda self, name: nn.Module.__getattr__(self, name)
    report = patch_model(cls(), patch_layers=True)
    assert report.declined[-1].reason == "its class has a __getattr__ of its own"


def test_a_helper_of_the_rotation_that_is_replaced_later(class_of, tmp_path, folded):
    path = tmp_path / "rotations.py"
    path.write_text(
        "def rotary(q, k, cos, sin):\n    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)\n"
        "    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin\n"
    )
    scope = {"rotate_half": rotate_half}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    original, ours = (made(class_of, source(), scope["rotary"])() for _ in range(2))
    assert patch_model(ours, patch_layers=True, backend="torch").attention
    for calls in (1, 1):
        assert all(map(torch.equal, ours(**given()), original(**given())))
        assert len(folded) == calls
        scope["rotate_half"] = torch.neg
