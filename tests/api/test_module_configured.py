# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm.configured: classes with other defaults, which do what model code does with its norm class."""

import copy
import inspect
import io
import pickle
import pickletools
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from tilegym_rmsnorm import BackendUnavailableError, RMSNorm, patch_model, rms_norm

N = 8


class Named(RMSNorm):
    """A subclass at the top of a module, with an option of its own."""

    def __init__(self, normalized_shape, gain: float = 1.0, **options):
        super().__init__(normalized_shape, **options)
        self.gain = gain

    def forward(self, x, residual=None):
        return self.gain * super().forward(x, residual)


class Mixin:
    pass


class OfConfigured(RMSNorm.configured(offset=1.0)):
    pass


def test_it_is_a_class_of_norm():
    cls = RMSNorm.configured(casting="llama")
    assert issubclass(cls, RMSNorm) and issubclass(cls, nn.RMSNorm) and cls is not RMSNorm
    assert isinstance(cls(N), cls) and not isinstance(RMSNorm(N), cls)
    assert cls.__name__ == "RMSNorm" and cls.__module__ == "tilegym_rmsnorm" and cls.__doc__
    assert cls.__qualname__ == "RMSNorm.configured(casting='llama')" and cls.__qualname__ in repr(cls)
    assert repr(cls(N)) == repr(RMSNorm(N, casting="llama"))


def test_every_default():
    options = {
        "eps": 1e-6,
        "elementwise_affine": True,
        "device": "meta",
        "dtype": torch.bfloat16,
        "offset": 1,
        "bias": True,
        "casting": "llama",
        "backend": "torch",
    }
    norm = RMSNorm.configured(**options)(N)
    assert repr(norm) == repr(RMSNorm(N, **options))
    for parameter in (norm.weight, norm.bias):
        assert parameter.device.type == "meta" and parameter.dtype == torch.bfloat16
    assert not list(RMSNorm.configured(elementwise_affine=False)(N).parameters())


def test_what_is_given_comes_before_the_defaults():
    cls = RMSNorm.configured(eps=1e-6, offset=1.0, bias=True)
    assert cls(N).eps == 1e-6 and cls(N, 1e-3).eps == 1e-3 and cls(N, eps=None).eps is None
    assert cls(N, offset=0.5).offset == 0.5 and not hasattr(cls(N, bias=False), "bias")


def test_the_same_defaults_give_the_same_class():
    cls = RMSNorm.configured(eps=1e-6, offset=1)
    assert RMSNorm.configured(offset=1.0, eps=1e-6) is cls
    assert RMSNorm.configured(offset=1.0) is not cls and RMSNorm.configured() is RMSNorm.configured()
    assert RMSNorm.configured(device="cpu") is RMSNorm.configured(device=torch.device("cpu"))


def test_the_same_class_in_every_thread():
    found, start = [], threading.Barrier(8)

    def configure():
        start.wait()
        found.append(RMSNorm.configured(eps=0.125, offset=0.75))

    threads = [threading.Thread(target=configure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_configured_twice():
    cls = RMSNorm.configured(offset=1.0, casting="llama").configured(casting="once", eps=1e-5)
    assert cls is RMSNorm.configured(offset=1.0, casting="once", eps=1e-5)
    norm = cls(N)
    assert (norm.offset, norm.casting, norm.eps) == (1.0, "once", 1e-5)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"casting": "gemma"}, ValueError, "casting: expected one of"),
        ({"casting": ["once"]}, ValueError, "casting: expected one of"),
        ({"offset": "1"}, TypeError, "offset: expected a finite number"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of"),
        ({"eps": "a"}, TypeError, "eps: expected a finite number, at least 0, or None, got 'a'"),
        ({"bias": 1}, TypeError, "bias: expected a bool, got 1"),
        ({"bias": None}, TypeError, "bias: expected a bool, got None"),
        ({"bias": torch.zeros(N)}, TypeError, "bias: expected a bool, got a tensor of shape"),
        ({"elementwise_affine": None}, TypeError, "elementwise_affine: expected a bool, got None"),
        ({"dtype": "bfloat16"}, TypeError, "dtype: expected None or a dtype of .*, got 'bfloat16'"),
        ({"device": "nowhere"}, RuntimeError, "nowhere"),
        ({"variance_epsilon": 1e-6}, TypeError, "expected eps= for variance_epsilon="),
        ({"normalized_shape": 8}, TypeError, "expected options among eps, .*, got 'normalized_shape'"),
        ({"hidden_size": 8}, TypeError, "expected options among eps, .*, got 'hidden_size'"),
    ],
    ids=str,
)
def test_options_are_checked_when_configured(options, error, text):
    with pytest.raises(error, match=text):
        RMSNorm.configured(**options)
    if not {"variance_epsilon", "normalized_shape", "hidden_size"} & set(options):  # Python refuses these
        with pytest.raises(error, match=text):
            RMSNorm(N, **options)


@pytest.mark.parametrize(
    "args, named",
    [
        ((N,), {}),
        ((N, 1e-5), {}),
        ((N,), {"eps": 1e-5}),
        ((), {"hidden_size": N, "eps": 1e-5}),
        ((), {"dim": N, "eps": 1e-5}),
        ((), {"normalized_shape": N}),
        ((), {"dim": N, "eps": 1e-5, "with_scale": True}),
        ((N,), {"eps": 1e-5, "with_scale": False}),
        ((N, 1e-5), {"with_scale": False}),
        (((2, 4),), {}),
    ],
    ids=str,
)
def test_what_model_code_passes(args, named):
    """All ways in which transformers 5.23 builds norms whose forward takes x alone and that know their width."""
    norm = RMSNorm.configured(eps=1e-6)(*args, **named)
    assert norm.normalized_shape in ((N,), (2, 4))
    assert norm.eps == (1e-5 if len(args) > 1 else named.get("eps", 1e-6))
    assert (norm.weight is None) is (not named.get("with_scale", True))


@pytest.mark.parametrize(
    "args, named, text",
    [
        (
            (N,),
            {"group_size": 2},
            "RMSNorm: expected arguments among normalized_shape, eps, .*dim.*, got 'group_size'",
        ),
        ((N,), {"dim": N}, "expected one value of normalized_shape, got another by 'dim'"),
        (
            (),
            {"dim": N, "hidden_size": N},
            "expected one value of normalized_shape, got another by 'hidden_size'",
        ),
        ((N, 1e-5, True, None, None, 1.0), {}, "expected at most 5 positional arguments, got 6"),
        ((), {"eps": 1e-5}, "normalized_shape"),
    ],
    ids=str,
)
def test_what_is_no_argument(args, named, text):
    with pytest.raises(TypeError, match=text):
        RMSNorm.configured()(*args, **named)


def test_the_signature_has_the_defaults():
    parameters = inspect.signature(RMSNorm.configured(eps=1e-6, offset=1.0)).parameters
    assert list(parameters) == list(inspect.signature(RMSNorm).parameters)
    assert parameters["eps"].default == 1e-6 and parameters["offset"].default == 1.0
    assert parameters["bias"].default is False and parameters["casting"].default == "once"


@pytest.mark.parametrize(
    "cls", [RMSNorm.configured(offset=1.0, dtype=torch.float64, device="cpu"), OfConfigured]
)
def test_copies_and_pickles_have_the_same_class(cls):
    assert copy.deepcopy(cls) is cls and copy.copy(cls) is cls
    norm = cls(N, eps=0.25)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(cls, protocol)) is cls
        assert type(pickle.loads(pickle.dumps(norm, protocol))) is cls
    for twin in (copy.deepcopy(norm), copy.copy(norm)):
        assert type(twin) is cls and repr(twin) == repr(norm)
    file = io.BytesIO()
    torch.save(nn.Sequential(norm), file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)[0]
    x = torch.randn(3, N, dtype=norm.weight.dtype)
    assert type(twin) is cls and torch.equal(twin(x), norm(x))


@pytest.mark.parametrize(
    ("library", "options"), [("dill", {}), ("dill", {"recurse": True}), ("cloudpickle", {})], ids=str
)
def test_other_pickles_have_the_same_class(library, options):
    library = pytest.importorskip(library)
    norm, x = RMSNorm.configured(offset=1.0, casting="llama")(N), torch.randn(3, N)
    twin = library.loads(library.dumps(nn.Sequential(norm), **options))[0]
    assert type(twin) is type(norm) and torch.equal(twin(x), norm(x))


def test_pickles_name_public_modules_alone():
    """So that the files behind them can move."""
    norms = RMSNorm(N), RMSNorm.configured(offset=1.0)(N), BackendUnavailableError("no")
    patched = nn.Sequential(nn.RMSNorm(N))
    patch_model(patched)
    named = [
        argument.split()[0]
        for opcode, argument, _ in pickletools.genops(pickle.dumps((*norms, patched), protocol=2))
        if opcode.name == "GLOBAL" and argument.startswith("tilegym_rmsnorm")
    ]
    public = {"tilegym_rmsnorm", "tilegym_rmsnorm.nn", "tilegym_rmsnorm.integrations.huggingface"}
    assert set(named) == public


def test_a_whole_model_is_loaded_by_a_fresh_process(tmp_path):
    norm = RMSNorm.configured(offset=1.0, casting="llama")(N, bias=True)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, N))
    x = torch.randn(3, N)
    torch.save((nn.Sequential(norm), x, norm(x)), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, x, y = torch.load(sys.argv[1], weights_only=False)\n"
        "from tilegym_rmsnorm import RMSNorm\n"
        "assert type(model[0]) is RMSNorm.configured(casting='llama', offset=1.0)\n"
        "assert torch.equal(model(x), y)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)


def test_subclasses_can_be_configured():
    cls = Named.configured(gain=3.0, offset=1.0)
    norm, x = cls(dim=N, eps=1e-5), torch.randn(3, N)
    assert isinstance(norm, Named) and cls.__qualname__ == "Named.configured(gain=3.0, offset=1.0)"
    assert torch.equal(norm(x), 3.0 * rms_norm(x, (N,), eps=1e-5))
    assert type(pickle.loads(pickle.dumps(norm))) is cls
    with pytest.raises(TypeError, match="got 'gian'"):
        Named.configured(gian=3.0)
    assert OfConfigured(N).offset == 1.0 and OfConfigured.configured(offset=0.0)(N).offset == 0.0
    assert issubclass(OfConfigured.configured(offset=0.0), OfConfigured)


def test_a_model_that_is_wrapped_anew():
    """fully_shard and parametrizations derive a class from the norm's."""
    norm, x = RMSNorm.configured(offset=1.0)(N), torch.randn(3, N)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert isinstance(norm, RMSNorm.configured(offset=1.0)) and torch.equal(
        copy.deepcopy(norm)(x), rms_norm(x, (N,))
    )
    norm = RMSNorm.configured(offset=1.0)(N)
    norm.__class__ = type("FSDPRMSNorm", (Mixin, type(norm)), {})
    assert isinstance(norm, RMSNorm.configured(offset=1.0)) and torch.equal(norm(x), rms_norm(x, (N,)))
