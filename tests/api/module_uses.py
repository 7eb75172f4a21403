# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Uses of a norm: building, keeping and changing it, then calling, transforming and recording it.

Functions of the class, torch.nn.RMSNorm or one that stands in for it."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm

N = 8
SAVED_STATE = {"weight": torch.linspace(0.5, 2, N)}
USES: dict[str, Callable[[type], Any]] = {}
REFUSALS: dict[str, tuple[Callable[[type], Any], str]] = {}


def use(function: Callable[[type], Any]) -> Callable[[type], Any]:
    """Add a use that runs and comes to the same."""
    USES[function.__name__] = function
    return function


def refusal(text: str) -> Callable[[Callable[[type], Any]], Callable[[type], Any]]:
    """Add a use that raises; either class's message matches `text`, which names the fault."""

    def keep(function: Callable[[type], Any]) -> Callable[[type], Any]:
        REFUSALS[function.__name__] = function, text
        return function

    return keep


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*(shape or (5, N)), generator=generator).to(dtype)


def built(cls: type, *args: Any, **options: Any) -> nn.Module:
    """A norm with weights away from 1."""
    norm = cls(*(args or (N,)), **options)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, norm.weight.numel()).view_as(norm.weight))
    return norm


def results(norm: nn.Module, x: Tensor | None = None) -> list[Any]:
    """y, dx and the gradients of the parameters by name."""
    x = (rows() if x is None else x).detach().requires_grad_()
    y = norm(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, {name: p.grad for name, p in norm.named_parameters()}]


@use
def positional_arguments(cls):
    norm = built(cls, (2, 4), 1e-3, True, "cpu", torch.float64)
    return (
        norm.normalized_shape,
        norm.eps,
        norm.elementwise_affine,
        norm.weight,
        norm(rows(3, 2, 4, dtype=torch.float64)),
    )


@use
def keyword_arguments(cls):
    norm = cls(normalized_shape=N, eps=0.5, elementwise_affine=True, device="cpu", dtype=torch.float16)
    return norm.eps, norm.weight, norm(rows(dtype=torch.float16))


@use
def the_signature_begins_alike(cls):
    return [(p.name, p.default, p.kind) for p in inspect.signature(cls).parameters.values()][:5]


@refusal("momentum")
def an_unknown_keyword(cls):
    return cls(N, momentum=0.1)


@refusal("normalized_shape")
def no_shape(cls):
    return cls()


@refusal("normalized_shape")
def a_shape_of_no_dimensions(cls):
    return cls(())(rows())


@refusal("size|normalized_shape")
def a_shape_of_strings(cls):
    return cls("ab")


@use
def no_bias(cls):
    norm = cls(N)
    return hasattr(norm, "bias"), getattr(norm, "bias", "none"), dict(norm._parameters), "bias" in dir(norm)


@refusal("'bias'")
def bias_is_an_attribute_error(cls):
    return cls(N).bias


@use
def registers_a_bias_of_ones_own(cls):
    norm = cls(N)
    norm.register_parameter("bias", nn.Parameter(torch.zeros(N)))
    return list(norm.state_dict()), norm(rows())


@use
def names(cls):
    norm = cls(N)
    parts = norm.named_parameters, norm.named_buffers, norm.named_modules, norm.named_children
    return (
        [[name for name, _ in part()] for part in parts],
        list(norm.state_dict()),
        cls.__name__,
        norm._get_name(),
    )


@use
def loads_strictly(cls):
    norm = cls(N)
    return (
        norm.load_state_dict(SAVED_STATE, strict=True),
        norm.load_state_dict(SAVED_STATE, assign=True),
        norm(rows()),
    )


@refusal("bias")
def refuses_unexpected_keys(cls):
    return cls(N).load_state_dict({**SAVED_STATE, "bias": torch.zeros(N)})


@refusal("weight")
def refuses_missing_keys(cls):
    return cls(N).load_state_dict({})


@use
def the_state_dict_goes_to_torch(cls):
    norm = nn.RMSNorm(N)
    return norm.load_state_dict(built(cls).state_dict()), norm.weight


@use
def casts(cls):
    changes = (
        lambda n: n.to(torch.bfloat16),
        nn.Module.half,
        nn.Module.double,
        nn.Module.bfloat16,
        lambda n: n.to("cpu"),
    )
    changed = [change(built(cls)) for change in changes]
    return [(norm.weight, norm(rows(dtype=norm.weight.dtype))) for norm in changed]


@use
def the_meta_device(cls):
    norm = cls(N, device="meta")
    y = norm(torch.empty(2, N, device="meta"))
    norm = norm.to_empty(device="cpu")
    norm.reset_parameters()
    return y.device, y.shape, norm.weight


@use
def under_the_meta_device(cls):
    with torch.device("meta"):
        norm = cls(N)
    return norm.weight.device, norm.weight.shape


@use
def skip_init(cls):
    norm = nn.utils.skip_init(cls, N, dtype=torch.float64)
    return norm.weight.shape, norm.weight.dtype, norm.weight.device


@use
def copies_and_pickles(cls):
    norm = built(cls)
    norm.eval()
    twins = [copy.deepcopy(norm), copy.copy(norm)]
    twins += [pickle.loads(pickle.dumps(norm, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    return [(type(twin) is type(norm), twin.training, *results(twin)) for twin in twins]


@use
def set_state(cls):
    norm, other = cls(N), built(cls)
    norm.__setstate__(other.__dict__.copy())
    return norm(rows())


@use
def shares_memory(cls):
    return cls(N).share_memory().weight.is_shared()


@use
def flat_parameters(cls):
    norm = built(cls)
    vector = nn.utils.parameters_to_vector(norm.parameters())
    nn.utils.vector_to_parameters(2 * vector, norm.parameters())
    return vector, norm.weight


@use
def constants(cls):
    return set(nn.RMSNorm.__constants__) <= set(cls.__constants__)


@use
def resets(cls):
    norm = built(cls)
    norm.reset_parameters()
    return norm.weight


@use
def modes(cls):
    norm = cls(N)
    return norm.training, norm.eval().training, norm.train().training


@use
def applies_an_initialization(cls):
    def initialize(part):
        if isinstance(part, nn.RMSNorm):
            nn.init.constant_(part.weight, 3.0)

    return nn.Sequential(cls(N)).apply(initialize)[0].weight


@use
def assignments(cls):
    norm = built(cls)
    norm.weight = nn.Parameter(torch.full((N,), 2.0))
    norm.eps = 0.25
    return norm(rows())


@refusal("'weight'")
def a_weight_that_is_no_parameter(cls):
    norm = cls(N)
    norm.weight = torch.ones(N)


@use
def a_weight_taken_away(cls):
    norm = built(cls)
    norm.weight = None
    return norm(rows())


@refusal("'weight'")
def deletes_the_weight(cls):
    norm = cls(N)
    del norm.weight
    return norm(rows())


@use
def the_fields_of_its_text(cls):
    text = repr(cls((2, 4), 1e-5))
    return text.startswith("RMSNorm((2, 4), eps=1e-05, elementwise_affine=True")


@use
def optimizers(cls):
    norm = built(cls)
    optimizer = torch.optim.AdamW(norm.parameters(), lr=0.1)
    results(norm)
    optimizer.step()
    return norm.weight


@use
def a_dictionary_of_attributes(cls):
    norm = cls(N, 1e-5)
    return {name: norm.__dict__[name] for name in nn.RMSNorm(N).__dict__ if name not in ("_parameters",)}


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@refusal(r"normalized_shape.*5, 9")
def an_input_of_another_shape(cls):
    return cls(N)(rows(5, N + 1))


@refusal("input.*list")
def no_tensor(cls):
    return cls(N)([1.0] * N)


@refusal("Long|input: expected a dtype of .* got torch.int64")
def integers(cls):
    return cls(N)(torch.ones(2, N, dtype=torch.int64))


@use
def shapes(cls):
    x = rows(3, 2, 4)
    each = (4, [4], (2, 4), [2, 4], torch.Size([2, 4]), (3, 2, 4))
    return [(norm.normalized_shape, norm(x)) for norm in (built(cls, shape) for shape in each)]


@use
def gradients(cls):
    return results(built(cls))


@use
def gradients_of_a_weight_with_dimensions(cls):
    return results(built(cls, (2, 4)), rows(3, 2, 4))


@use
def no_rows(cls):
    return results(built(cls), torch.empty(0, N))


@use
def without_weight(cls):
    norm = cls(N, elementwise_affine=False)
    return norm.weight, list(norm.parameters()), norm.state_dict(), results(norm), norm.reset_parameters()


@use
def mixed_dtypes(cls):
    norm = built(cls)
    return [norm(rows(dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float64)]


@use
def parametrized(cls):
    norm = built(cls)
    parametrize.register_parametrization(norm, "weight", Doubled())
    before = results(norm)
    parametrize.remove_parametrizations(norm, "weight")
    return before, norm.weight, results(norm)


@use
def a_copy_of_a_parametrized_norm(cls):
    norm = built(cls)
    parametrize.register_parametrization(norm, "weight", Doubled())
    return results(copy.deepcopy(norm))


@use
def weight_norm(cls):
    return results(parametrizations.weight_norm(built(cls)))


@use
def weight_norm_of_old(cls):
    return results(old_weight_norm(built(cls)))


@use
def spectral_norm(cls):
    torch.manual_seed(0)
    return results(parametrizations.spectral_norm(built(cls)))


@use
def functional_call(cls):
    return torch.func.functional_call(built(cls), {"weight": torch.arange(8.0)}, (rows(),))


@use
def ensembles(cls):
    norms = [built(cls), cls(N)]
    parameters, buffers = torch.func.stack_module_state(norms)
    base = copy.deepcopy(norms[0]).to("meta")

    def loss(parameters, x):
        return torch.func.functional_call(base, (parameters, {}), (x,)).square().sum()

    x = rows()
    return (
        sorted(parameters),
        buffers,
        torch.vmap(loss, (0, None))(parameters, x),
        torch.vmap(torch.func.grad(loss), (0, None))(parameters, x),
    )


@use
def jacobians(cls):
    norm = built(cls)
    return torch.func.jacrev(norm)(rows()), torch.func.jvp(norm, (rows(),), (rows() + 1,))


@use
def frozen(cls):
    norm = built(cls).requires_grad_(False)
    return [p.requires_grad for p in norm.parameters()], norm(rows()).requires_grad, results(norm)


@use
def hooks(cls):
    norm, seen = built(cls), []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs) or (2 * inputs[0],))
    norm.register_forward_hook(lambda _, inputs, y: seen.append((inputs, y)) or 3 * y)
    norm.register_full_backward_hook(lambda _, dx, dy: seen.append((dx, dy)) or (4 * dx[0],))
    norm.weight.register_hook(lambda dw: 5 * dw)
    return results(norm), seen


@use
def in_a_transformer_layer(cls):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(N, 2, 16, dropout=0.0, batch_first=True)
    layer.norm1, layer.norm2 = built(cls), built(cls)
    return results(layer, rows(2, 3, N)), list(layer.state_dict())


@use
def compiled(cls):
    torch._dynamo.reset()
    return results(torch.compile(built(cls), backend="eager"))


@use
def exported(cls):
    program = torch.export.export(nn.Sequential(built(cls)), (rows(),), strict=False)
    return list(program.state_dict), program.module()(rows())


@use
def under_inference_mode_and_autocast(cls):
    norm = built(cls)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return norm(rows()), norm(rows(dtype=torch.bfloat16))


@use
def without_gradients(cls):
    norm = built(cls)
    norm.zero_grad()
    with torch.no_grad():
        return norm(rows()).requires_grad, norm.weight.grad
