# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Liger's autograd functions replaced in all of Liger, beside Liger's own kernels: on a GPU, or in Triton's
interpreter."""

import functools
import importlib
import sys
from types import ModuleType

import pytest
import torch
from helpers import DEVICE, FP16, FP32, HAS_GPU

from tilegym_rmsnorm.integrations import liger as ours

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt(x)


NORM, ADD = ours.FUNCTIONS
ARGUMENTS = {
    NORM: "X, W, eps, offset, casting_mode, in_place, row_mode",
    ADD: "X, R, W, eps, offset, casting_mode, in_place",
}


class Number(float):
    """A number as Liger's kernels find it: Triton's interpreter leaves a float a float."""

    def to(self, dtype):
        return self


EPS, OFFSET = Number(1e-6), Number(1.0)


@pytest.fixture
def liger(monkeypatch):
    pytest.importorskip("liger_kernel", reason="liger_kernel is not installed")
    if triton is None:
        pytest.skip("triton is not installed")
    if not HAS_GPU:  # the interpreter has no libdevice, from which Liger takes rsqrt
        for file, _ in ours.FUNCTIONS.values():
            monkeypatch.setattr(importlib.import_module(f"liger_kernel.ops.{file}"), "rsqrt", rsqrt)
    return importlib.import_module("liger_kernel.ops")


@pytest.fixture
def calls(monkeypatch):
    """The functions of ours that were called, by name of Liger's class."""
    found = []
    for name, (file, function) in ours.FUNCTIONS.items():

        @functools.wraps(function)
        def counted(*args, name=name, function=function, **kwargs):
            found.append(name)
            return function(*args, **kwargs)

        monkeypatch.setitem(ours.FUNCTIONS, name, (file, counted))
    return found


def holders(name=NORM):
    """Modules of Liger's that have this class, and the class."""
    return {
        module: vars(found)[name]
        for module, found in sorted(sys.modules.items())
        if module.startswith("liger_kernel") and name in getattr(found, "__dict__", {})
    }


def results(liger, name, dtype, mode, offset):
    torch.manual_seed(0)
    count = 1 if name == NORM else 2
    inputs = [torch.randn(2, 3, 64, device=DEVICE).to(dtype).requires_grad_() for _ in range(count)]
    inputs.append(torch.randn(64, device=DEVICE).to(dtype).requires_grad_())
    others = (False, None) if name == NORM else (False,)
    found = getattr(liger, name).apply(*inputs, EPS, offset, mode, *others)
    found = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(found, inputs, [torch.randn_like(each) for each in found])
    return *found, *gradients


@pytest.mark.parametrize(
    ("mode", "offset"), [("llama", Number(0.0)), ("gemma", OFFSET), ("none", Number(0.0))]
)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", [NORM, ADD])
def test_values_and_gradients_are_liger_s(liger, calls, name, dtype, mode, offset):
    expected = results(liger, name, dtype, mode, offset)
    assert not calls
    with ours.register():
        found = results(liger, name, dtype, mode, offset)
    assert calls == [name]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == FP32 else {"rtol": 4e-3, "atol": 4e-3}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_every_module_of_liger_s(liger, calls):
    """Those that call the classes by the names in their own module, and what picks an implementation itself."""
    transformers = importlib.import_module("liger_kernel.transformers")
    functions = importlib.import_module("liger_kernel.transformers.functional")
    fused = importlib.import_module("liger_kernel.transformers.fused_add_rms_norm")
    before = {name: holders(name) for name in ours.FUNCTIONS}
    assert all(len(each) >= 4 for each in before.values())
    norm, add = transformers.LigerRMSNorm(8).to(DEVICE), fused.LigerFusedAddRMSNorm(8).to(DEVICE)
    gemma = importlib.import_module("liger_kernel.transformers.rms_norm").LigerRMSNormForGemma4(8).to(DEVICE)
    keys, x = list(norm.state_dict()), torch.randn(3, 8, device=DEVICE)
    with ours.register():
        for name, modules in before.items():
            assert all(issubclass(each, ours._Replaced) for each in holders(name).values())
            assert holders(name).keys() == modules.keys()
        norm(x), gemma(x), functions.liger_rms_norm(x, norm.weight, 1e-6)
        assert calls == [NORM] * 3 and list(norm.state_dict()) == keys
        add(x, x), functions.liger_fused_add_rms_norm(x, x, add.weight, 1e-6)
        assert calls[3:] == [ADD] * 2
    for name, modules in before.items():
        found = holders(name)
        assert all(found[module] is theirs for module, theirs in modules.items())


def test_modules_imported_later_and_those_of_others(liger, monkeypatch):
    importlib.import_module("liger_kernel.transformers.rms_norm")
    theirs = getattr(liger, NORM)
    trainer = ModuleType("trainer")
    setattr(trainer, NORM, theirs)
    monkeypatch.setitem(sys.modules, "trainer", trainer)
    name = "liger_kernel.transformers.rms_norm"
    monkeypatch.setattr(importlib.import_module("liger_kernel.transformers"), "rms_norm", sys.modules[name])
    monkeypatch.delitem(sys.modules, name)
    with ours.register():
        assert getattr(trainer, NORM) is not theirs
        later = importlib.import_module(name)
        assert getattr(later, NORM) is getattr(liger, NORM) is not theirs
        setattr(trainer, NORM, theirs)
        with ours.register():
            assert issubclass(getattr(trainer, NORM), ours._Replaced)
        assert issubclass(getattr(trainer, NORM), ours._Replaced)
    assert getattr(trainer, NORM) is getattr(later, NORM) is getattr(liger, NORM) is theirs


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_last_one_to_end_puts_back(liger, first_ends_first):
    theirs = holders()
    one, other = ours.register(), ours.register()
    assert not set(holders().values()) & set(theirs.values())
    (one if first_ends_first else other).undo()
    (one if first_ends_first else other).undo()
    assert not set(holders().values()) & set(theirs.values())
    (other if first_ends_first else one).undo()
    assert holders() == theirs
    with pytest.raises(RuntimeError, match=r"this registration was undone; call register\(\)"), one:
        pass
    with ours.register():
        assert holders() != theirs
    assert holders() == theirs


def test_what_another_library_puts_in_meanwhile_stays(liger, monkeypatch):
    module = importlib.import_module("liger_kernel.transformers.rms_norm")
    theirs = getattr(liger, NORM)
    monkeypatch.setattr(module, NORM, theirs)  # puts Liger's back after the test
    another = type(NORM, (), {})
    with ours.register():
        setattr(module, NORM, another)
    assert getattr(module, NORM) is another and getattr(liger, NORM) is theirs


def test_compiled_with_and_without(liger, monkeypatch):
    """A graph that was compiled with ours runs no longer than a registration."""
    torch._dynamo.reset()
    module = importlib.import_module("liger_kernel.transformers.rms_norm")
    norm, x = module.LigerRMSNorm(8).to(DEVICE), torch.randn(3, 8, device=DEVICE)
    graphs = []
    compiled = torch.compile(norm, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    with ours.register():
        expected, found = norm(x), compiled(x)
        assert torch.equal(found, expected) and len(graphs) == 1
        assert any("tilegym_rmsnorm" in str(node.target) for node in graphs[0].graph.nodes)
    apply = staticmethod(lambda *args: torch.zeros_like(args[0]))
    monkeypatch.setattr(module, NORM, type(NORM, (), {"apply": apply}))
    assert not compiled(x).any()


@pytest.mark.parametrize("is_bound", [False, True], ids=["class", "instance"])
def test_a_model_of_transformers_that_liger_has_changed(liger, calls, is_bound, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    patching = importlib.import_module("liger_kernel.transformers.monkey_patch")
    monkeypatch.setattr(modeling, "LlamaRMSNorm", modeling.LlamaRMSNorm)
    config = modeling.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    options = {"rope": False, "swiglu": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    if not is_bound:
        patching.apply_liger_kernel_to_llama(**options)
    model = modeling.LlamaForCausalLM(config).to(DEVICE)
    if is_bound:
        patching.apply_liger_kernel_to_llama(**options, model=model)
    for module in model.modules():
        if hasattr(module, "casting_mode"):
            module.variance_epsilon, module.offset = Number(1e-5), Number(0.0)
    tokens = torch.randint(32, (2, 4), device=DEVICE)

    def step():
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}

    loss, gradients = step()
    assert not calls
    with ours.register():
        found, ours_of = step()
    assert calls == [NORM] * 3
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours_of, gradients, rtol=1e-4, atol=1e-6)


# Without Liger


def stand_in(name, arguments):
    return type(name, (), {"forward": eval(f"lambda ctx, {arguments}: None")})


@pytest.fixture
def stand_ins(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    package = ModuleType("liger_kernel")
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    package.ops = ModuleType("liger_kernel.ops")
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", package.ops)
    for name, (file, _) in ours.FUNCTIONS.items():
        module = ModuleType(f"liger_kernel.ops.{file}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        theirs = stand_in(name, ARGUMENTS[name])
        setattr(module, name, theirs)
        setattr(package.ops, name, theirs)
    return package.ops


def test_another_implementation_s_class_is_replaced_too(stand_ins):
    """LIGER_KERNEL_IMPL puts another class into liger_kernel.ops than the file has."""
    of_file, chosen = getattr(stand_ins, NORM), stand_in(NORM, ARGUMENTS[NORM])
    setattr(stand_ins, NORM, chosen)
    with ours.register():
        of_ops, found = (
            vars(sys.modules[name])[NORM] for name in ("liger_kernel.ops", "liger_kernel.ops.rms_norm")
        )
        assert of_ops.original is chosen and found.original is of_file
        assert of_ops.apply is found.apply is ours.liger_rms_norm
    assert getattr(stand_ins, NORM) is chosen
    assert getattr(sys.modules["liger_kernel.ops.rms_norm"], NORM) is of_file


@pytest.mark.parametrize(
    "arguments", ["X, W, offset, eps", "X, W, eps, offset, casting_mode, in_place, row_mode, z"]
)
def test_other_arguments_are_refused(stand_ins, arguments):
    theirs = getattr(stand_ins, ADD)
    other = stand_in(NORM, arguments)
    setattr(stand_ins, NORM, other)
    message = f"^{NORM}.apply: expected the arguments {ARGUMENTS[NORM]}, got {arguments}$"
    with pytest.raises(RuntimeError, match=message):
        ours.register()
    assert getattr(stand_ins, NORM) is other and getattr(stand_ins, ADD) is theirs


def test_an_earlier_release_without_row_mode(stand_ins):
    theirs, x = stand_in(NORM, "X, W, eps, offset, casting_mode, in_place"), torch.randn(3, 8)
    setattr(stand_ins, NORM, theirs)
    with ours.register():
        y = getattr(stand_ins, NORM).apply(x, None, 1e-6, 0.0, "llama", True)
    assert torch.equal(y, ours.liger_rms_norm(x, None, 1e-6))
    assert getattr(stand_ins, NORM) is theirs


@pytest.mark.parametrize("missing", ["liger_kernel", ADD])
def test_without_liger(stand_ins, monkeypatch, missing):
    theirs = getattr(stand_ins, NORM)
    if missing == ADD:
        delattr(stand_ins, ADD)
    else:
        for name in [each for each in sys.modules if each.startswith("liger_kernel.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(
        ImportError, match=r"register needs Liger with liger_kernel.ops.Liger\w+, such as 0.8.5"
    ):
        ours.register()
    assert getattr(stand_ins, NORM) is theirs
