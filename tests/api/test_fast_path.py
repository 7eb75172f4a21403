# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Layers of torch.nn that read a norm's weight, bias and eps in place of calling it."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm

N, EPS = 16, 1e-5
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
Configured = RMSNorm.configured(eps=EPS, bias=True)


class Formula(nn.Module):
    """RMSNorm written out, for float64."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.weight, self.its_bias = norm, norm.weight, getattr(norm, "bias", None)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight
        return y if self.its_bias is None else y + self.its_bias


def random_norm(cls=RMSNorm, bias: bool = True) -> RMSNorm:
    norm = cls(N, EPS, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    return norm


def encoder_layer(cls=nn.TransformerEncoderLayer, norm_first: bool = False) -> nn.TransformerEncoderLayer:
    return cls(N, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first).eval()


def wrong_by(model: nn.Module, x: Tensor, padding: Tensor | None = None, norms=("norm1", "norm2")) -> float:
    """Return the distance of `model` from itself in float64, norms written out, in training: nothing is fused."""
    expected = copy.deepcopy(model).double().train()
    for layer in getattr(expected, "layers", [expected]):
        for name in norms:
            norm = getattr(layer, name)
            setattr(layer, name, Formula(getattr(norm, "_orig_mod", norm)))
    given = {} if padding is None else {"src_key_padding_mask": padding}
    with torch.no_grad():
        difference = model(x, **given) - expected(x.double(), **given)
    return difference[~PADDING if padding is not None else slice(None)].abs().max().item()


def x() -> Tensor:
    return torch.randn(2, 5, N)


@pytest.mark.parametrize("cls", [RMSNorm, Configured], ids=["RMSNorm", "configured"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
def test_an_encoder_layer_calls_its_norms(cls, bias, norm_first, padding):
    """The layer computed LayerNorm instead, and without a bias raised AttributeError."""
    layer = encoder_layer(norm_first=norm_first)
    layer.norm1, layer.norm2 = random_norm(cls, bias), random_norm(cls, bias)
    assert wrong_by(layer, x(), padding) < 1e-5


def test_one_norm_is_enough():
    layer = encoder_layer()
    layer.norm2 = random_norm()
    assert wrong_by(layer, x(), norms=["norm2"]) < 1e-5


def test_a_wrapped_norm():
    layer = encoder_layer()
    layer.norm1, layer.norm2 = (torch.compile(random_norm(), backend="eager") for _ in range(2))
    assert wrong_by(layer, x()) < 1e-5


def test_a_subclass_of_the_layer():
    class Layer(nn.TransformerEncoderLayer):
        def __init__(self, *sizes, **options):
            super().__init__(*sizes, **options)
            self.norm1, self.norm2 = random_norm(), random_norm()

    assert wrong_by(encoder_layer(Layer), x()) < 1e-5


def test_a_class_in_the_place_of_layer_norm(monkeypatch):
    """The constructor of the layer decides about the fast path after it made the norms."""
    monkeypatch.setattr(nn.modules.transformer, "LayerNorm", Configured)
    layer = encoder_layer()
    assert type(layer.norm1) is Configured
    nn.init.normal_(layer.norm1.bias)
    assert wrong_by(layer, x()) < 1e-5


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
def test_a_stack_of_layers(padding):
    layer = encoder_layer()
    layer.norm1, layer.norm2 = random_norm(), random_norm()
    assert wrong_by(nn.TransformerEncoder(layer, 2).eval(), x(), padding) < 1e-5


def test_norms_that_a_stack_gets_later():
    """The stack may have chosen nested tensors, which raise."""
    stack = nn.TransformerEncoder(encoder_layer(), 2).eval()
    for layer in stack.layers:
        layer.norm1, layer.norm2 = random_norm(), random_norm()
    assert wrong_by(stack, x()) < 1e-5
    with pytest.raises(TypeError, match="input: expected no nested tensor"), torch.no_grad():
        stack(x(), src_key_padding_mask=PADDING)
    stack.use_nested_tensor = False
    assert wrong_by(stack, x(), PADDING) < 1e-5


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), lambda layer: saved_and_loaded(layer)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(copied):
    layer = encoder_layer()
    layer.norm1, layer.norm2 = random_norm(Configured), random_norm(Configured)
    assert wrong_by(copied(layer), x()) < 1e-5


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("transform", ["compile", "export", "strict export"])
def test_graphs_of_an_encoder_layer(transform):
    torch._dynamo.reset()
    layer, given = encoder_layer(), x()
    layer.norm1, layer.norm2 = random_norm(), random_norm()
    with torch.no_grad():
        if transform == "compile":
            graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
        else:
            graph = torch.export.export(layer, (given,), strict=transform != "export").module()
        torch.testing.assert_close(graph(given), layer(given))
    assert wrong_by(layer, given) < 1e-5


def test_what_a_layer_keeps():
    layer, plain = encoder_layer(), encoder_layer()
    for _ in range(3):
        layer.norm1 = layer.norm2 = random_norm(bias=True)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert len(layer._forward_pre_hooks) == 1
    assert not plain._forward_pre_hooks and plain.activation_relu_or_gelu
    layer.load_state_dict(plain.state_dict())


def test_a_layer_without_rms_norm_keeps_its_fast_path(monkeypatch):
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *given: calls.append(1) or fused(*given)
    )
    layer = encoder_layer()
    layer.norm1 = nn.LayerNorm(N)
    with torch.no_grad():
        layer(x())
        assert calls == [1]
        layer.norm1 = random_norm()
        layer(x())
    assert calls == [1]


def test_a_decoder_layer_calls_its_norms():
    layer = nn.TransformerDecoderLayer(N, 2, 24, dropout=0.0, batch_first=True).eval()
    layer.norm1, layer.norm2, layer.norm3 = (random_norm() for _ in range(3))
    expected = copy.deepcopy(layer).double().train()
    for name in ("norm1", "norm2", "norm3"):
        setattr(expected, name, Formula(getattr(expected, name)))
    given, memory = x(), x()
    with torch.no_grad():
        assert (layer(given, memory) - expected(given.double(), memory.double())).abs().max() < 1e-5
