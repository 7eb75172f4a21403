# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calling, transforming and recording a norm.

Functions of the class, torch.nn.RMSNorm or one that stands in for it.
"""

import copy

import torch
from module_uses import N, built, refusal, results, rows, use
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm


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
