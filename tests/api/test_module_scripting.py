# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in models that torch.jit.script compiles: the reference, in TorchScript."""

import copy
import io

import pytest
import torch
from torch import nn

from tilegym_rmsnorm import BackendUnavailableError, RMSNorm, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

N = 8
OPTIONS = {
    "as torch": {},
    "eps": {"eps": 0.25},
    "offset": {"offset": 1.0},
    "bias": {"bias": True},
    "llama": {"casting": "llama", "eps": 1e-5},
    "everything": {"offset": 1.0, "bias": True, "casting": "llama", "backend": "torch"},
    "no weight": {"elementwise_affine": False},
    "no weight, llama": {"elementwise_affine": False, "casting": "llama"},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def built(shape=N, **options) -> RMSNorm:
    generator = torch.Generator().manual_seed(1)
    norm = RMSNorm(shape, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return norm


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, N)), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(leaf).square().sum(), [leaf, *model.parameters()]))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scripted_model_computes_and_trains_as_the_eager_one(name, dtype):
    model, x = nn.Sequential(built(dtype=dtype, **OPTIONS[name]), nn.SiLU()), rows().to(dtype)
    norm = model[0]
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    for one, other in zip(gradients(scripted, x), gradients(model, x), strict=True):
        torch.testing.assert_close(one, other)
    # PyTorch puts what __prepare_scriptable__ returns into the model.
    assert model[0] is norm and type(norm) is RMSNorm


@pytest.mark.parametrize("name", OPTIONS)
def test_complex_numbers(name):
    """With an offset, a bias or casting="llama" the imaginary part was lost."""
    norm, x = built(**OPTIONS[name]), torch.complex(rows(), rows().flip(0))
    torch.testing.assert_close(torch.jit.script(norm)(x), norm(x))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_bits_of_the_reference(name, dtype, weight_dtype):
    norm, x = built(dtype=weight_dtype, **OPTIONS[name]), rows().to(dtype)
    y, expected = torch.jit.script(norm)(x), norm(x)
    if name in ("as torch", "eps", "no weight"):  # ATen's own formula
        torch.testing.assert_close(y, expected)
    else:
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_shared_and_keep_their_names(name):
    norm = built(**OPTIONS[name])
    scripted = torch.jit.script(norm)
    assert list(scripted.state_dict()) == list(norm.state_dict())
    for one, other in zip(scripted.parameters(), norm.parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr()
    assert scripted.training and not torch.jit.script(norm.eval()).training


@pytest.mark.parametrize("name", OPTIONS)
def test_saved_and_loaded(name):
    norm, file = built(**OPTIONS[name]), io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Sequential(norm)), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert sorted(loaded.state_dict()) == sorted(f"0.{key}" for key in norm.state_dict())
    torch.testing.assert_close(loaded(rows()), norm(rows()))
    for one, other in zip(gradients(loaded, rows()), gradients(norm, rows()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}], ids=str)
def test_several_dimensions_and_no_rows(options):
    norm = built((2, 4), **options)
    scripted = torch.jit.script(norm)
    torch.testing.assert_close(scripted(rows(3, 2, 4)), norm(rows(3, 2, 4)))
    assert scripted(torch.empty(0, 2, 4)).shape == (0, 2, 4)


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}], ids=str)
@pytest.mark.parametrize("shape", [(5, N + 1), (5, 1), ()])
def test_an_input_of_another_shape_is_refused(options, shape):
    with pytest.raises(Exception, match="(?i)expected.* shape|must have at least 1 dim"):
        torch.jit.script(built(**options))(torch.ones(shape))


def test_a_residual_is_refused():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm(N)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self.norm(x, residual)

    with pytest.raises(Exception, match="residual: expected None in TorchScript, got a tensor"):
        torch.jit.script(Block())(rows(), rows())


@pytest.mark.parametrize("backend", ["cutile", "triton", "inductor"])
def test_a_kernel_by_name_is_refused(backend):
    model = nn.Sequential(RMSNorm(N, backend=backend))
    with pytest.raises(
        BackendUnavailableError, match=rf"backend '{backend}' was asked for.*TorchScript.*backend to"
    ):
        torch.jit.script(model)
    model[0].backend = None
    torch.testing.assert_close(torch.jit.script(model)(rows()), model(rows()))


def test_the_backend_in_effect_does_not_count():
    norm = built(backend="auto")
    torch.testing.assert_close(torch.jit.script(norm)(rows()), norm(rows()))


def test_a_forward_of_ones_own_is_compiled():
    class Halved(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    torch.testing.assert_close(torch.jit.script(Halved(N))(rows()), 0.5 * rms_norm(rows(), (N,)))


def test_configured_classes_and_modules_that_changed_their_class():
    for norm in (RMSNorm.configured(offset=1.0, casting="llama")(N), nn.RMSNorm(N)):
        if type(norm) is nn.RMSNorm:
            norm.__class__ = RMSNorm.configured(offset=1.0)
        torch.testing.assert_close(torch.jit.script(nn.Sequential(norm))(rows()), norm(rows()))


def test_a_bias_set_later_and_one_taken_away():
    norm = built()
    norm.bias = nn.Parameter(torch.rand(N))
    torch.testing.assert_close(
        torch.jit.script(norm)(rows()), rms_norm(rows(), (N,), norm.weight, bias=norm.bias)
    )
    norm.bias = None
    torch.testing.assert_close(
        torch.jit.script(copy.deepcopy(norm))(rows()), rms_norm(rows(), (N,), norm.weight)
    )
