# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The norm that Megatron-Core builds: what it reads of a config, values, and `(y, x)`, of which one backward adds both
gradients. Megatron-Core is not needed here."""

import copy
import pickle
import types

import pytest
import torch
from helpers import BF16, DEVICE, FP32, FP64

import tilegym_rmsnorm
from tilegym_rmsnorm.integrations.megatron import RMSNorm, RMSNormWithResidual
from tilegym_rmsnorm.ops.norm import passes


def config_of(**more):
    """The fields of TransformerConfig that a norm reads, of 0.16.1 and of the repository after it."""
    given = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "params_dtype": FP32,
        "sequence_parallel": False,
        "use_cpu_initialization": DEVICE.type == "cpu",
        "init_model_with_meta_device": False,
        "batch_invariant_mode": False,
        "fused_residual_rmsnorm": False,
    }
    return types.SimpleNamespace(**{**given, **more})


def reference(x, weight, eps, is_centered):
    x = x.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y * (weight.double() + is_centered)


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("is_centered", [False, True])
def test_values_and_gradients(backend, is_centered, dtypes):
    """y has weight's dtype, as in TransformerEngine: the residual stream may be float32 beside bfloat16 weights."""
    torch.manual_seed(0)
    x_dtype, weight_dtype = dtypes
    config = config_of(layernorm_zero_centered_gamma=is_centered, params_dtype=weight_dtype)
    norm = RMSNorm(config=config, hidden_size=64, eps=1e-3, backend=backend)
    assert norm.weight.dtype == weight_dtype and norm.weight.device == DEVICE
    assert torch.equal(norm.weight, torch.full_like(norm.weight, 1.0 - is_centered))
    norm.weight.data.add_(torch.randn_like(norm.weight))
    x = (torch.randn(5, 2, 64, device=DEVICE) * torch.logspace(-2, 1, 5, device=DEVICE)[:, None, None]).to(
        x_dtype
    )
    x.requires_grad_()
    y = norm(x)
    assert y.dtype == weight_dtype
    expected = reference(x, norm.weight, 1e-3, is_centered)
    dy = torch.randn_like(expected).to(y.dtype)
    got = y, *torch.autograd.grad(y, (x, norm.weight), dy)
    wanted = expected, *torch.autograd.grad(expected, (x, norm.weight), dy.double())
    for each, other in zip(got, wanted, strict=True):
        tolerance = 1e-5 if each.dtype == FP32 else 1e-2
        torch.testing.assert_close(each.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_each_way_in_which_megatron_calls_it():
    config, options = config_of(sequence_parallel=True), {"hidden_size": 8, "eps": 1e-3}
    old = {"persist_layer_norm": True, "zero_centered_gamma": False, "normalization": "RMSNorm"}
    for norm in (
        RMSNorm(config=config, **options),
        RMSNorm(config, 8, 1e-3),
        RMSNorm(config, **options, **old),
    ):
        assert (norm.normalized_shape, norm.eps, norm.weight.sequence_parallel) == ((8,), 1e-3, True)
        assert not norm.returns_residual and [*norm.state_dict()] == ["weight"]
    assert RMSNorm(config, 8).eps == 1e-5  # Mamba's layers give none
    assert RMSNorm(config_of(), 8).weight.sequence_parallel is False
    older = config_of()
    for name in ("init_model_with_meta_device", "batch_invariant_mode", "fused_residual_rmsnorm"):
        delattr(older, name)
    assert RMSNormWithResidual(older, 8).returns_residual is False


@pytest.mark.parametrize(
    "config, options, message",
    [
        ({"normalization": "LayerNorm"}, {}, "config.normalization: expected \"RMSNorm\", got 'LayerNorm'"),
        ({}, {"normalization": "LayerNorm"}, "^normalization: expected"),
        (
            {},
            {"zero_centered_gamma": True},
            "zero_centered_gamma: expected False, as in the config, got True",
        ),
        ({"batch_invariant_mode": True}, {}, "config.batch_invariant_mode: expected False, got True"),
        ({}, {"backend": "cuda"}, "cuda"),
        ({}, {"hidden_size": -1}, r"got \(-1,\)"),
        ({}, {"eps": -1.0}, "eps"),
    ],
)
def test_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        RMSNorm(**{"config": config_of(**config), "hidden_size": 8, **options})


@pytest.mark.parametrize("has_residual", [None, False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_pair_needs_the_place_and_the_config(has_residual, is_fused):
    config = config_of(fused_residual_rmsnorm=is_fused)
    assert RMSNorm(config, 8, has_residual=has_residual).returns_residual is (
        is_fused and has_residual is True
    )
    norm = RMSNormWithResidual(config, 8, has_residual=has_residual)
    assert norm.returns_residual is (is_fused and has_residual is not False)


@pytest.mark.usefixtures("marks_end")
@pytest.mark.parametrize("returns_residual", [False, True])
def test_gradient_accumulation_fusion(returns_residual):
    """The weight adds dw to its main_grad, that of a weight that left the meta device too."""
    config = config_of(gradient_accumulation_fusion=True, fused_residual_rmsnorm=True, params_dtype=BF16)
    with torch.device("meta"):
        norm = RMSNorm(
            config_of(**vars(config) | {"use_cpu_initialization": True}), 8, has_residual=returns_residual
        )
    norm.to_empty(device=DEVICE).reset_parameters()
    norm.weight.main_grad = torch.zeros(8, device=DEVICE)
    exact = torch.zeros(8, dtype=torch.float64, device=DEVICE)
    for _ in range(3):
        x = torch.randn(5, 2, 8, dtype=BF16, device=DEVICE).requires_grad_()
        y, dy = norm(x), torch.randn(5, 2, 8, dtype=BF16, device=DEVICE)
        if returns_residual:
            torch.autograd.backward(y, (dy, torch.ones_like(dy)))
        else:
            y.backward(dy)
        x = x.detach().double()
        exact += (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)).sum((0, 1))
    assert norm.weight.grad is None
    torch.testing.assert_close(norm.weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)
    other = RMSNorm(config_of(params_dtype=BF16), 8)
    other.weight.main_grad = torch.zeros(8, device=DEVICE)
    other(x.bfloat16()).sum().backward()
    assert other.weight.grad is not None and not other.weight.main_grad.any()


def test_the_device_of_the_weight():
    here = RMSNorm(config_of(init_model_with_meta_device=True, use_cpu_initialization=False), 8)
    assert here.weight.is_meta
    with torch.device("meta"):  # as Megatron's weights on CPUs
        assert RMSNorm(config_of(use_cpu_initialization=True), 8).weight.is_meta


@pytest.mark.parametrize("is_centered", [False, True])
def test_a_norm_that_leaves_the_meta_device(is_centered):
    """Megatron-FSDP moves modules and calls reset_parameters: the weight is a new one."""
    config = config_of(
        layernorm_zero_centered_gamma=is_centered,
        sequence_parallel=True,
        init_model_with_meta_device=True,
        use_cpu_initialization=False,
    )
    norm = RMSNorm(config, 8)
    old = norm.weight
    norm = norm.to_empty(device=DEVICE)
    norm.reset_parameters()
    assert norm.weight is not old and norm.weight.sequence_parallel
    assert torch.equal(norm.weight, torch.full((8,), 1.0 - is_centered, device=DEVICE))


def test_state_dicts_copies_and_pickles():
    norm = RMSNormWithResidual(config_of(fused_residual_rmsnorm=True, layernorm_zero_centered_gamma=True), 8)
    norm.weight.data.normal_()
    of_te = norm.state_dict() | {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    other = RMSNormWithResidual(config_of(), 8)
    other.load_state_dict(of_te)
    assert torch.equal(other.weight, norm.weight) and "_extra_state" in of_te
    x = torch.randn(3, 8, device=DEVICE)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(copied) is RMSNormWithResidual and copied.returns_residual
        assert torch.equal(copied(x)[0], norm(x)[0])


# (y, x)


def pair_of(backend=None, dtype=FP32, **more):
    torch.manual_seed(0)
    config = config_of(fused_residual_rmsnorm=True, params_dtype=dtype, **more)
    norm = RMSNormWithResidual(config, 64, eps=1e-3, backend=backend)
    norm.weight.data.add_(torch.randn_like(norm.weight))
    return norm, torch.randn(5, 2, 64, device=DEVICE).to(dtype).requires_grad_()


def float64_of(norm, x):
    """Leaves of x and weight in float64, and y."""
    leaves = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    return leaves, reference(*leaves, norm.eps, norm.offset)


@pytest.fixture
def added(monkeypatch):
    """What is given to each backward that is bound, to be added to dx."""
    found, bind = [], passes.bind_backward

    def noting(tensors, *rest):
        found.append(tensors[4])
        return bind(tensors, *rest)

    monkeypatch.setattr(passes, "bind_backward", noting)
    return found


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_one_backward_adds_both_gradients(backend, dtype, is_centered, added):
    norm, x = pair_of(backend, dtype, layernorm_zero_centered_gamma=is_centered)
    (dy, dr), edges = torch.randn(2, *x.shape, device=DEVICE).to(dtype), (x, norm.weight)
    leaves, expected = float64_of(norm, x)
    wanted = torch.autograd.grad((expected, leaves[0]), leaves, (dy.double(), dr.double()))
    for _ in range(3):  # by checks, then known where the backend's calls are
        y, residual = norm(x)
        assert y.grad_fn is residual.grad_fn  # so that autograd adds nothing
        assert residual.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(residual, x) and torch.equal(y, norm(x.detach())[0])
        got = torch.autograd.grad((y, residual), edges, (dy, dr))
        tolerance = 1e-5 if dtype == FP32 else 1e-2
        for each, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(each.double(), other, rtol=tolerance, atol=tolerance)
    assert added and all(each is not None for each in added)
    # Autograd's sum rounds dx of the norm, and then the sum.
    y = tilegym_rmsnorm.rms_norm(x, 64, norm.weight, norm.eps, offset=norm.offset, backend=backend)
    apart = torch.autograd.grad((y, x * 1.0), edges, (dy, dr))
    torch.testing.assert_close(got[1], apart[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[0], apart[0], rtol=2 * tolerance, atol=2 * tolerance)
    if dtype == BF16:
        rounded = wanted[0].to(BF16)
        assert (got[0] != rounded).sum() < (apart[0] != rounded).sum() / 2


def test_a_known_pair_passes_no_checks(checks):
    norm, x = pair_of("torch")
    for _ in range(3):
        sum(each.sum() for each in norm(x)).backward()
    assert len(checks) == 1
    with torch.no_grad():  # another call, that returns x itself
        assert norm(x)[1] is x


def test_uses_of_one_result():
    norm, x = pair_of()
    leaves, expected = float64_of(norm, x)
    d = torch.randn_like(x)
    dx, dw = torch.autograd.grad(norm(x)[0], (x, norm.weight), d)
    wanted = torch.autograd.grad(expected, leaves, d.double())
    for each, other in zip((dx, dw), wanted, strict=True):
        torch.testing.assert_close(each.double(), other, rtol=1e-5, atol=1e-5)
    dx, dw = torch.autograd.grad(norm(x)[1], (x, norm.weight), d, allow_unused=True)
    assert torch.equal(dx, d) and dw is None


def test_frozen_parts():
    norm, x = pair_of()
    y, residual = norm(x.detach())
    assert y.requires_grad and not residual.requires_grad
    norm.weight.requires_grad_(False)
    assert not norm(x.detach())[0].requires_grad
    leaves, expected = float64_of(norm, x)
    (sum(each.square().sum() for each in norm(x))).backward()
    (wanted,) = torch.autograd.grad(expected.square().sum() + leaves[0].square().sum(), leaves[:1])
    torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    assert norm.weight.grad is None


def test_gradients_of_gradients():
    norm, _ = pair_of(dtype=FP64)
    x = torch.randn(2, 64, dtype=FP64, device=DEVICE, requires_grad=True)

    def pair(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(pair, (x, norm.weight))
    assert torch.autograd.gradgradcheck(pair, (x, norm.weight))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed(use_reentrant):
    norm, x = pair_of()

    def step(x):
        y, residual = norm(x)
        return y * 2 + residual.square()

    results = []
    for run in (step, lambda x: torch.utils.checkpoint.checkpoint(step, x, use_reentrant=use_reentrant)):
        x.grad = norm.weight.grad = None
        run(x).sum().backward()
        results.append((x.grad, norm.weight.grad))
    assert all(map(torch.equal, *results))


def test_transforms_and_other_tensors():
    """Autograd, or who transforms the call, adds the gradients."""
    norm, x = pair_of()
    weight = norm.weight.detach()

    def loss(x):
        y, residual = torch.func.functional_call(norm, {"weight": weight}, (x,))
        return (y * 2 + residual.square()).sum()

    (wanted,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), wanted)
    of_each = torch.func.vmap(torch.func.grad(loss))(x.detach())
    torch.testing.assert_close(of_each, wanted)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], wanted)
    pending = torch.imag(torch.complex(x, x).conj())  # minus x, as soon as something reads it
    assert pending.is_neg() and norm(pending)[1] is pending
    empty = x[:0].detach().requires_grad_()
    loss(empty).backward()
    assert empty.grad.shape == (0, 2, 64)


def test_a_pair_of_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    norm, x = pair_of()
    norm, x = norm.cpu(), x.detach().cpu()
    local = x.clone().requires_grad_()
    (norm(local)[0] * 2 + norm(local)[1].square()).sum().backward()
    norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    y, residual = norm(sharded)
    assert isinstance(y, DTensor) and residual is sharded
    (y * 2 + residual.square()).sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), local.grad)


@pytest.mark.slow
def test_compiled(fresh_dynamo):
    norm, x = pair_of()

    def step(x):
        y, residual = norm(x)
        return (y * 2 + residual.square()).sum()

    gradients = [
        torch.autograd.grad(run(x), (x, norm.weight))
        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))
    ]
    for each, other in zip(*gradients, strict=True):
        torch.testing.assert_close(each, other)
