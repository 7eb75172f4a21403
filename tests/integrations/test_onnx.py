# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms in ONNX models, which onnxruntime runs."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32
from hf_models import ARCHITECTURES, TOKENS
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm, patch_model, qk_norm_rope, rms_norm, rms_norm_rope, use_backend

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.no_gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
BATCH, LENGTH, HEADS, N, EPS = 3, 5, 4, 64, 1e-6

# Calls whose tensors and weights have names; which of them a call takes is up to it.
NORMS: dict[str, Callable[..., Any]] = {
    "weight": lambda x, w, **_: rms_norm(x, N, w, EPS),
    "no weight": lambda x, **_: rms_norm(x, N, None, EPS),
    "default eps": lambda x, w, **_: rms_norm(x, N, w),
    "bias": lambda x, w, b, **_: rms_norm(x, N, w, EPS, bias=b),
    "bias alone": lambda x, b, **_: rms_norm(x, N, bias=b),
    "offset": lambda x, w, **_: rms_norm(x, N, w, EPS, offset=1.0),
    "residual": lambda x, r, w, **_: rms_norm(x, N, w, EPS, residual=r),
    "alpha": lambda x, r, w, b, **_: rms_norm(x, N, w, EPS, residual=r, residual_alpha=0.5, bias=b),
    "wide sum": lambda x, r, w, **_: rms_norm(x, N, w, EPS, residual=r.float()),
    "narrow sum": lambda x, r, w, **_: rms_norm(
        x, N, w, EPS, residual=r.float(), residual_dtype=x.dtype, out_dtype=FP32, casting="llama"
    ),
    "heads": lambda x, w_heads, **_: rms_norm(x, N, w_heads, EPS, bias=w_heads.flip(0)),
    "two dimensions": lambda x, w_heads, **_: rms_norm(x, (HEADS, N), w_heads, EPS),
    "llama": lambda x, w, **_: rms_norm(x, N, w, EPS, casting="llama"),
    "float32 weight": lambda x, w, **_: rms_norm(x, N, w.float(), EPS, casting="llama"),
}
ROPES: dict[str, Callable[..., Any]] = {
    "both weights": lambda q, k, c, s, w, b, **_: qk_norm_rope(q, k, w, b, c, s, eps=EPS),
    "a weight for each head": lambda q, k, c, s, w, w_heads, **_: qk_norm_rope(
        q, k, w_heads, w, c, s, eps=EPS, offset=1.0
    ),
    "interleaved": lambda q, k, c, s, w, b, **_: qk_norm_rope(q, k, w, b, c, s, interleaved=True),
    "a part": lambda q, k, c, s, w, b, **_: qk_norm_rope(
        q, k, w, b, c[:, : N // 2], s[:, : N // 2], rotary_dim=N // 2
    ),
    "half tables": lambda q, k, c, s, w, b, **_: qk_norm_rope(q, k, w, b, c[:, : N // 2], s[:, : N // 2]),
    "each rounded": lambda q, k, c, s, w, b, **_: qk_norm_rope(
        q, k, w, b, c, s, eps=EPS, casting="llama", rope_rounding="each"
    ),
    "q alone": lambda q, c, s, w, **_: rms_norm_rope(q, w, c, s, eps=EPS),
    "three dimensions": lambda q, k, c, s, w, b, **_: qk_norm_rope(q[0], k[0], w, b, c, s, eps=EPS),
}
ROUNDED = ("weight", "alpha", "wide sum", "narrow sum", "llama", "float32 weight")


@pytest.fixture(autouse=True)
def no_lines_about_torchvision():
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)


class Calls(nn.Module):
    """Calls of the same tensors, in some dtypes. Tensors are given as float32, and so are results, since NumPy has no
    bfloat16."""

    def __init__(
        self, names: str, calls: dict[str, Callable[..., Any]], dtypes: tuple[torch.dtype, ...] = (FP32,)
    ):
        super().__init__()
        self.names, self.calls, self.dtypes = names.split(), calls, dtypes
        for name, lead in (("w", ()), ("b", ()), ("w_heads", (HEADS,))):
            setattr(self, name, nn.Parameter(1 + 0.3 * torch.randn(*lead, N)))

    def forward(
        self, first, second, third=None, fourth=None
    ):  # torch 2.9 has no names for the sizes of *tensors
        tensors = [each for each in (first, second, third, fourth) if each is not None]
        results = []
        for dtype in self.dtypes:
            given = {name: each.to(dtype) for name, each in zip(self.names, tensors, strict=True)}
            given |= {name: each.to(dtype) for name, each in self.named_parameters()}
            for call in self.calls.values():
                result = call(**given)
                results += result if isinstance(result, tuple) else [result]
        return tuple(each.float() for each in results)


def onnx_model(model: Any, tensors: tuple[Tensor, ...], **options: Any) -> Callable[..., list[Tensor]]:
    """Export to ONNX. The result is a function of tensors. In the model are operators of ONNX alone."""
    program = torch.onnx.export(model, tensors, dynamo=True, verbose=False, **options)
    assert not {node.domain for node in program.model_proto.graph.node} - {""}
    return runner(program.model_proto.SerializeToString())


def runner(model: Any) -> Callable[..., list[Tensor]]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*tensors):
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(each) for each in session.run(None, given)]

    return run


def assert_same(results: Any, expected: Any) -> None:
    """Allow for float32 sums in another order than eager calls."""
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value.detach(), rtol=3e-6, atol=3e-6)


def rows(*lead: int) -> Tensor:
    """Make rows of different sizes."""
    return torch.randn(*lead, N) * torch.rand(*lead, 1).add(0.1)


def of_heads(batch: int, length: int) -> tuple[Tensor, ...]:
    """Make q, k, cos and sin."""
    q, k = rows(batch, length, HEADS), rows(batch, length, 2)
    return q, k, *(torch.rand(length, N) * 2 - 1 for _ in range(2))


def test_each_option_of_a_norm():
    """No ONNX function was found for the op."""
    model = Calls("x r", NORMS)
    given = [(rows(batch, LENGTH, HEADS), rows(batch, LENGTH, HEADS)) for batch in (BATCH, 1, 7)]
    run = onnx_model(model, given[0], dynamic_shapes=({0: "batch"}, {0: "batch"}))
    for tensors in given:
        assert_same(run(*tensors), model(*tensors))


def test_each_option_of_norm_and_rotation():
    model = Calls("q k c s", ROPES)
    given = [of_heads(*sizes) for sizes in ((BATCH, LENGTH), (1, 7), (2, 1), (4, 4))]
    q, table = {0: "batch", 1: "length"}, {0: "length"}
    run = onnx_model(model, given[0], dynamic_shapes=(q, q, table, table))
    for tensors in given:
        assert_same(run(*tensors), model(*tensors))


def test_positions_of_tables():
    class Model(nn.Module):
        def forward(self, q, k, cos, sin, positions):
            return qk_norm_rope(q, k, None, None, cos, sin, position_ids=positions)

    q, k, _, _ = of_heads(BATCH, LENGTH)
    positions = torch.randint(9, (BATCH, LENGTH))
    positions[0, :2] = torch.tensor((-1, 9))  # outside of the tables: NaN
    tensors = q, k, torch.randn(9, N), torch.randn(9, N), positions
    results, expected = onnx_model(Model(), tensors)(*tensors), Model()(*tensors)
    assert expected[0].isnan().any() and not expected[0].isnan().all()
    torch.testing.assert_close(results, expected, rtol=3e-6, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"opset_version": 23, "optimize": False}], ids=["", "opset 23"])
def test_roundings_of_16_bits(options):
    """Each is kept: without those of "llama", of a sum or of a rotation, tens of percent of the elements differ."""
    for names, calls, given in (
        ("x r", {name: NORMS[name] for name in ROUNDED}, (rows(BATCH), rows(BATCH))),
        (
            "q k c s",
            {name: ROPES[name] for name in ("both weights", "each rounded")},
            of_heads(BATCH, LENGTH),
        ),
    ):
        model = Calls(names, calls, (FP16, BF16))
        assert_same_bits(onnx_model(model, given, **options)(*given), model(*given))


def assert_same_bits(results: Any, expected: Any) -> None:
    """But for sums in another order, which round a few elements the other way."""
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        assert (result != value).float().mean() < 0.05
        torch.testing.assert_close(result, value.detach(), rtol=0.0, atol=0.02 * value.abs().max().item())


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_was_exported_before(strict):
    torch._dynamo.reset()
    model, given = Calls("x r", {name: NORMS[name] for name in ROUNDED}, (BF16,)), (rows(BATCH), rows(BATCH))
    program = torch.export.export(model, given, strict=strict)
    assert "tilegym_rmsnorm.rms_norm_forward" in program.graph_module.code
    assert_same_bits(onnx_model(program, ())(*given), model(*given))


def test_a_kernel_that_was_asked_for_by_name():
    """The graph has another runtime, which has none."""
    model, x = RMSNorm(N, backend="cutile"), rows(BATCH)
    assert_same(onnx_model(model, (x,))(x), [RMSNorm(N, backend="torch")(x)])


def test_the_operator_of_opset_23():
    model, x = RMSNorm(N), rows(BATCH)
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, opset_version=23)
    assert [node.op_type for node in program.model_proto.graph.node] == ["RMSNormalization"]
    assert_same(runner(program.model_proto.SerializeToString())(x), [model(x)])


def test_under_use_backend():
    """casting="llama" raised for 16 bits: ONNX has no view of bits."""
    model = Calls("x r", {name: NORMS[name] for name in ("weight", "llama")}, (BF16,))
    given = rows(BATCH), rows(BATCH)
    with use_backend("torch"):
        assert_same_bits(onnx_model(model, given)(*given), model(*given))


def test_by_torch_jit_trace(tmp_path):
    for dtype, compare in ((FP32, assert_same), (FP16, assert_same_bits)):
        model = Calls("x r", {name: NORMS[name] for name in ROUNDED}, (dtype,))
        given, path = (rows(BATCH), rows(BATCH)), tmp_path / "model.onnx"
        torch.onnx.export(model, given, path, dynamo=False, input_names=["x", "r"])
        compare(runner(str(path))(*given), model(*given))


def test_ops_stay_in_other_graphs():
    """Also where torch.onnx is imported, and after it exported a model."""
    model, x = RMSNorm(N), rows(BATCH)
    onnx_model(model, (x,))
    program = torch.export.export(model, (x,)).run_decompositions()
    assert "tilegym_rmsnorm.rms_norm_forward" in program.graph_module.code


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens).logits


@pytest.mark.parametrize("patch_layers", [False, True])
def test_a_patched_model(patch_layers):
    """Patched layers have the sums and the rotary embedding in our ops, too."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    (case,) = (case for case in ARCHITECTURES if case.name == "Qwen3")
    model = Logits(case.built().eval())
    expected = [model(tokens) for tokens in (TOKENS, TOKENS[:1, :7], TOKENS.repeat(2, 1))]
    report = patch_model(model.model, patch_layers=patch_layers)
    assert report.patched and bool(report.layers) == bool(report.attention) == patch_layers
    run = onnx_model(model, (TOKENS,), dynamic_shapes=({0: "batch", 1: "length"},))
    for logits in expected:
        batch, length, _ = logits.shape
        assert_same(run(TOKENS.repeat(2, 1)[:batch, :length]), [logits])
