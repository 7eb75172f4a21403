# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten: what it takes of F.rms_norm and nn.RMSNorm, with which values; calls that no kernel takes, and what
PyTorch does above the ops, such as autograd and torch.func, stay as they were; its end, in other overrides and beside
those of others."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from aten_cases import EPS, KEY, MARKS, fused, fused_backward, kernels, norm_of, overridden, results, taken
from helpers import BF16, DEVICE, FP16, FP32, FP64, HAS_GPU, assert_within, expected_results, make_inputs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import override_aten, set_backend, use_backend
from tilegym_rmsnorm.integrations import aten
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, TAKEN
from tilegym_rmsnorm.integrations.fx import replace_rmsnorm_pass
from tilegym_rmsnorm.settings import KERNEL_BACKENDS

pytestmark = MARKS


@pytest.mark.parametrize("kernel_backend", KERNEL_BACKENDS, indirect=True)
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.usefixtures("poisoned_empty")
def test_values(dtype, eps, has_weight):
    inputs = make_inputs(5, 100, dtype, dtype if has_weight else None, eps=EPS if eps is None else eps)
    with overridden() as override:
        found = results(inputs, eps)
        assert taken(override) == (1, 1)
    assert_within(expected_results(inputs), **found)


@pytest.mark.usefixtures("poisoned_empty")
def test_several_dimensions_and_strides():
    """x as a slice, weight as rows of another tensor, a transposed gradient: values, shapes, and contiguous results."""
    inputs = make_inputs(15, 32, BF16, BF16)
    x = torch.stack([inputs.x] * 3, 1)[:, 1].view(3, 5, 4, 8)
    weight = torch.stack([inputs.weight.view(4, 8)] * 2, 1)[:, 0]
    dy = inputs.dy.view(3, 5, 4, 8).transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(t.is_contiguous() for t in (x, weight, dy))
    with overridden() as override:
        y, rstd = fused(x, (4, 8), weight, inputs.eps)
        dx, dw = fused_backward(dy, x, (4, 8), rstd, weight, (True, True))
        assert taken(override) == (1, 1)
    assert rstd.shape == (3, 5, 1, 1) and rstd.dtype == FP32
    assert dw.shape == (4, 8) and all(t.is_contiguous() for t in (y, rstd, dx, dw))
    flat = {"y": y.view(15, 32), "rstd": rstd.flatten(), "dx": dx.view(15, 32), "dw": dw.flatten()}
    assert_within(expected_results(inputs), **flat)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
def test_output_mask(mask, has_weight):
    inputs = make_inputs(5, 32, FP32, FP32 if has_weight else None)
    with overridden() as override:
        _, rstd = fused(inputs.x, (32,), inputs.weight, inputs.eps)
        found = fused_backward(inputs.dy, inputs.x, (32,), rstd, inputs.weight, mask)
        assert taken(override) == (1, 1)
    assert [t is not None for t in found] == [mask[0], mask[1] and has_weight]
    given = {name: t for name, t in zip(("dx", "dw"), found, strict=True) if t is not None}
    assert_within(expected_results(inputs), **given)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = norm_of(3, 16), norm_of(16, requires_grad=False)
    with overridden() as override:
        F.rms_norm(x, (16,), weight).sum().backward()
        assert taken(override) == (1, 1)
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_module_trains(is_checkpointed):
    """Weights agree with ATen's, within float32."""

    def weights_after(steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.SiLU(), torch.nn.RMSNorm(16, eps=1e-5)
        ).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = norm_of(6, 8, requires_grad=False)
        for _ in range(steps):
            y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            (y - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    theirs = weights_after(3)
    with overridden() as override:
        ours = weights_after(3)
        assert taken(override) == (6 * (1 + is_checkpointed), 6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        override_aten()


def test_another_device():
    for wrong in (False, None):  # as if it were a switch
        with pytest.raises(
            ValueError, match=f"got {wrong}; undo\\(\\) of what override_aten returned ends it"
        ):
            override_aten(wrong)
    with pytest.raises(ValueError, match="device_type: expected 'cuda' or 'cpu', got \\[\\]$"):
        override_aten([])
    for wrong in (0, torch.zeros(2), torch.ones(2), torch.ones(2).numpy()):  # == would ask each element
        with pytest.raises(ValueError, match="^device_type: expected 'cuda' or 'cpu', got ") as raised:
            override_aten(wrong)
        assert "ends it" not in str(raised.value)
    with pytest.raises(ValueError, match="got device\\(type='cpu'\\): pass its type$"):
        override_aten(torch.device("cpu"))
    with pytest.raises(ValueError, match="device_type: expected 'cuda' or 'cpu', got 'mps'"):
        override_aten("mps")


def test_releases_that_lack_something(monkeypatch):
    with monkeypatch.context() as without:
        without.delattr(torch.library, "get_kernel")
        with pytest.raises(RuntimeError, match=r"get_kernel, which PyTorch has from 2\.9 on"):
            overridden()
    monkeypatch.setitem(aten.ATEN_SCHEMAS, ATEN_BACKWARD, "(Tensor input) -> Tensor")
    with pytest.raises(RuntimeError, match=r"knows aten::_fused_rms_norm_backward as PyTorch 2\.9"):
        overridden()


def test_no_half_a_patch(monkeypatch):
    """The second registration fails: the first one is taken back."""
    before, impl = kernels(), torch.library.Library.impl

    def fails_once(self, op, *arguments, **options):
        if op == ATEN_BACKWARD:
            raise RuntimeError("no")
        impl(self, op, *arguments, **options)

    monkeypatch.setattr(torch.library.Library, "impl", fails_once)
    with pytest.raises(RuntimeError, match="no"):
        overridden()
    assert kernels() == before


def declined(reason: str):
    x, weight, ones = (t.detach() for t in (norm_of(3, 16), norm_of(16), torch.ones(3, 1, device=DEVICE)))
    other = torch.randn(3, 16, device=DEVICE).as_subclass(type("Named", (torch.Tensor,), {}))
    lazy = torch._lazy_clone(norm_of(3, 16).detach())
    return {
        "float64": ("dtype", x.double(), weight.double(), x.double(), ones.double()),
        "no rows": ("memory", x[:0], weight, x[:0], ones[:0]),
        "no columns": ("memory", x[:, :0], weight[:0], x[:, :0], ones),
        "a subclass": ("memory", other, weight, x, ones),
        "shared until it is written": ("memory", lazy, weight, x, ones),
        "short weight": ("shape", x, weight[:1], x, ones),
    }[reason]


REASONS = ["float64", "no rows", "a subclass", "shared until it is written", "short weight"]
REASONS[:0] = [] if HAS_GPU else ["no columns"]


def test_gradients_that_no_kernel_takes():
    x, rstd = norm_of(3, 16).detach(), torch.ones(3, 1, device=DEVICE)
    lazy = torch._lazy_clone(norm_of(3, 16).detach())
    gradients = {
        "dtype": [(x.double(), rstd), (x, rstd.half())],
        "shape": [(x[:1], rstd), (x, rstd[:1])],
        "memory": [
            (lazy, rstd),
            (x, torch._lazy_clone(rstd.clone())),
            (x.as_subclass(type("Named", (torch.Tensor,), {})), rstd),
        ],
    }
    if HAS_GPU:
        gradients["shape"] += [(x.cpu(), rstd), (x, rstd.cpu())]
    with overridden() as override:  # it is asked alone: PyTorch's kernels do not look at what they are given

        def why(dy, rstd):
            at_once = override._patch._reason_at_once(x, None, dy, rstd)
            return at_once or override._patch._implementation("rms_norm_backward", x, [16], None, dy, rstd)

        assert not isinstance(why(x, rstd), str)
        for reason, several in gradients.items():
            assert [why(dy, each) for dy, each in several] == [reason] * len(several)
    assert torch._C._is_cow_tensor(lazy)  # nobody asked for its address


def outcome(function, *arguments):
    """Return a call's result, or its error's type."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("reason", REASONS)
def test_a_declined_forward_is_as_before(reason):
    category, x, weight, _, _ = declined(reason)
    arguments = x, x.shape[1:], weight, None
    theirs = outcome(fused, *arguments)
    with overridden() as override:
        ours = outcome(fused, *arguments)
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, category: 1}
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert not reason.startswith("shared") or torch._C._is_cow_tensor(x)  # nobody asked for its address


@pytest.mark.parametrize("reason", REASONS[:-1])
def test_a_declined_backward_is_as_before(reason):
    category, x, weight, dy, rstd = declined(reason)
    arguments = dy, x, x.shape[1:], rstd, weight, (True, True)
    with overridden() as override:
        ours = outcome(fused_backward, *arguments)
        assert override.stats[ATEN_BACKWARD] == {TAKEN: 0, category: 1}
    if HAS_GPU:
        theirs = outcome(fused_backward, *arguments)
    else:
        theirs = aten._backward_by_operations(*arguments)
        if x.numel():
            xhat = x.double() * rstd
            torch.testing.assert_close(theirs[1].double(), (dy.double() * xhat).sum(0), rtol=1e-5, atol=1e-5)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("eps", [-1e-3, float("inf"), float("nan")])
def test_an_eps_that_no_kernel_takes(eps):
    x = norm_of(3, 16, requires_grad=False)
    theirs = F.rms_norm(x, (16,), None, eps)
    with overridden() as override:
        torch.testing.assert_close(F.rms_norm(x, (16,), None, eps), theirs, equal_nan=True)
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "eps": 1}


def test_the_backend_in_effect_counts():
    x = norm_of(3, 16, requires_grad=False)
    with overridden() as override:
        with use_backend("torch"):
            F.rms_norm(x, (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "backend": 1}
        set_backend("torch")
        F.rms_norm(x, (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "backend": 2}
        set_backend(None)
        F.rms_norm(x, (16,))
        assert taken(override) == (int(HAS_GPU), 0)  # "auto" takes no interpreter


def test_a_backend_that_cannot_run_declines(monkeypatch):
    monkeypatch.setattr(aten, "why_unusable", lambda name, request: "it is not installed")
    with overridden() as override:
        F.rms_norm(norm_of(3, 16), (16,)).sum().backward()
        assert override.stats == {
            ATEN_FORWARD: {TAKEN: 0, "backend": 1},
            ATEN_BACKWARD: {TAKEN: 0, "backend": 1},
        }


def test_what_is_declined_by_its_dtype_is_asked_nothing_else(monkeypatch):
    """So that it costs little."""
    for name in ("is_plain", "_is_copied_on_write", "get_current_backend", "_implementation"):
        monkeypatch.setattr(aten, name, None)
    with overridden() as override:
        F.rms_norm(norm_of(3, 16, dtype=FP64, requires_grad=False), (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "dtype": 1}


def test_other_dtypes_of_weight_never_reach_the_op():
    x, weight = norm_of(3, 16, dtype=BF16), norm_of(16)
    with warnings.catch_warnings(), overridden() as override:
        warnings.simplefilter("ignore")  # F.rms_norm says so itself
        F.rms_norm(x, (16,), weight).float().sum().backward()
        assert override.stats == {ATEN_FORWARD: {TAKEN: 0}, ATEN_BACKWARD: {TAKEN: 0}}


def objective(x, weight):
    return F.rms_norm(x, (6,), weight, 1e-3).sin().sum()


def test_gradients_of_gradients():
    """gradgradcheck passes in float64, where calls are declined; in float32 the forward is taken."""
    x, weight = norm_of(3, 6, dtype=FP64), norm_of(6, dtype=FP64)

    def second(x, weight):
        gradients = torch.autograd.grad(objective(x, weight), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), (x, weight))

    theirs = second(x, weight)
    with overridden() as override:
        assert torch.autograd.gradgradcheck(
            lambda *leaves: F.rms_norm(leaves[0], (6,), leaves[1], 1e-3), (x, weight)
        )
        assert taken(override) == (0, 0)
        leaves = [t.detach().float().requires_grad_() for t in (x, weight)]
        ours = second(*leaves)
        assert taken(override)[0] == 1
    torch.testing.assert_close([t.double() for t in ours], list(theirs), rtol=1e-4, atol=1e-4)


TRANSFORMS = {
    "grad": (lambda x, w: torch.func.grad(objective, (0, 1))(x, w), True),
    "jvp": (
        lambda x, w: torch.func.jvp(lambda a, b: F.rms_norm(a, (6,), b, 1e-3), (x, w), (w.expand(3, 6), w)),
        True,
    ),
    "vmap": (lambda x, w: torch.vmap(lambda a: F.rms_norm(a, (6,), w, 1e-3))(x), False),
    "vmap of grad": (lambda x, w: torch.vmap(lambda a: torch.func.grad(objective)(a[None], w))(x), False),
    "vjp": (lambda x, w: torch.func.vjp(lambda a: F.rms_norm(a, (6,), w, 1e-3), x)[1](x), True),
    "jacrev": (lambda x, w: torch.func.jacrev(objective, (0, 1))(x, w), True),
    "hessian": (lambda x, w: torch.func.hessian(objective)(x, w), True),
    "functionalize": (lambda x, w: torch.func.functionalize(objective)(x, w), None),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name):
    """vmap decomposes the op: nothing of it arrives. None: that depends on the release."""
    transform, arrives = TRANSFORMS[name]
    x, weight = norm_of(3, 6, requires_grad=False), norm_of(6, requires_grad=False)
    theirs = transform(x.double(), weight.double())
    with overridden() as override:
        ours = transform(x, weight)
        assert arrives in (None, taken(override)[0] > 0)
    as_double = torch.utils._pytree.tree_map(torch.Tensor.double, ours)
    torch.testing.assert_close(as_double, theirs, rtol=1e-4, atol=1e-4)


def test_batches_of_gradients():
    x, weight, dy = norm_of(3, 16), norm_of(16), norm_of(2, 3, 16, requires_grad=False)

    def gradients():
        return torch.autograd.grad(F.rms_norm(x, (16,), weight), (x, weight), dy, is_grads_batched=True)

    theirs = gradients()
    with overridden() as override:
        torch.testing.assert_close(gradients(), theirs, rtol=1e-4, atol=1e-4)
        assert taken(override)[0] == 1


def test_modes_that_watch():
    x, weight = norm_of(3, 16), norm_of(16)
    with FlopCounterMode(display=False) as theirs:
        F.rms_norm(x, (16,), weight).sum().backward()
    expected, x.grad = x.grad, None
    with overridden(), FlopCounterMode(display=False) as ours:
        F.rms_norm(x, (16,), weight).sum().backward()
    assert ours.get_total_flops() == theirs.get_total_flops()
    torch.testing.assert_close(x.grad, expected)


def test_tensors_without_values_never_arrive():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with overridden() as override:
        assert F.rms_norm(torch.empty(3, 16, device="meta"), (16,)).shape == (3, 16)
        with FakeTensorMode():
            x = torch.empty(3, 16, device=DEVICE, requires_grad=True)
            F.rms_norm(x, (16,)).sum().backward()
            assert x.grad.shape == (3, 16)
        make_fx(lambda x: F.rms_norm(x, (16,)), tracing_mode="fake")(norm_of(3, 16, requires_grad=False))
        assert override.stats == {ATEN_FORWARD: {TAKEN: 0}, ATEN_BACKWARD: {TAKEN: 0}}


def test_inference_mode():
    x = norm_of(3, 16, requires_grad=False)
    with overridden() as override, torch.inference_mode():
        assert F.rms_norm(x.clone(), (16,)).is_inference()
        assert taken(override) == (1, 0)


def test_results_are_no_views():
    """Autograd lets one write into them in place."""
    with overridden() as override:
        y = F.rms_norm(norm_of(2, 3, 16), (16,))
        assert not y._is_view()
        y.mul_(2).sum().backward()
        assert taken(override) == (1, 1)


def test_autograd_inside_a_compiled_function():
    """Dynamo looks into what autograd calls where a graph breaks. It must not trace a launch."""

    def step(x):
        y = F.rms_norm(x, (16,))
        torch._dynamo.graph_break()
        return torch.autograd.grad(y.sum(), x)[0] + 1

    x = norm_of(3, 16)
    theirs = step(x)
    with overridden() as override:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(step, backend="eager")(x), theirs)
        assert taken(override) == (1, 1)
    torch._dynamo.reset()


@pytest.mark.skipif(HAS_GPU, reason="one gloo process has CPU tensors")
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.11", reason="DTensor has aten's rules from 2.11 on")
@pytest.mark.parametrize("dim", [0, 1])
def test_dtensor(dim, mesh):
    from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor

    inputs = make_inputs(6, 16)
    norm = torch.nn.RMSNorm(16, eps=inputs.eps)
    with torch.no_grad():
        norm.weight.copy_(inputs.weight)
    norm = torch.distributed.tensor.distribute_module(norm, mesh)
    x = distribute_tensor(inputs.x.float().view(2, 3, 16), mesh, [Shard(dim)]).requires_grad_()
    dy = distribute_tensor(inputs.dy.float().view(2, 3, 16), mesh, [Shard(dim)])
    with overridden() as override, debug.CommDebugMode() as communication:
        y = norm(x)
        y.backward(dy)
        assert taken(override) == (1, 1) and communication.get_total_counts() == 0
    assert y.placements == x.grad.placements == (Shard(dim),)
    assert norm.weight.placements == (Replicate(),)
    flat = {"y": y.detach(), "dx": x.grad}
    flat = {name: t.to_local().view(6, 16) for name, t in flat.items()}
    whole = inputs._replace(x=inputs.x.float(), dy=inputs.dy.float())
    assert_within(expected_results(whole), **flat, dw=norm.weight.grad.full_tensor())


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10", reason="torch 2.9 decomposes forwards when it traces"
)
def test_graphs_of_cpu_tensors_keep_the_norms_for_the_passes():
    """docs/traced-graphs.md says so. Without the override a tracer finds no norm of CPU tensors."""
    x, weight = norm_of(3, 6).cpu().detach().requires_grad_(), norm_of(6).cpu().detach().requires_grad_()

    def step(x, weight):
        return torch.autograd.grad(objective(x, weight), (x, weight))

    with override_aten("cpu"):
        gm = replace_rmsnorm_pass(make_fx(step, tracing_mode="fake")(x, weight))
    assert gm.meta["tilegym_rmsnorm_replaced"] == 2
    with use_backend("auto"):  # "cutile" takes tensors of a CPU in its interpreter alone
        torch.testing.assert_close(gm(x.detach(), weight.detach()), step(x, weight))


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
