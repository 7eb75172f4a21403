# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The choice of a backend: order, precedence, errors. No kernel runs here."""

import os
import re
import subprocess
import sys
import threading
from typing import get_args

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tilegym_rmsnorm
from tilegym_rmsnorm import (
    RMSNorm,
    override_aten,
    patch_model,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    settings,
)
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.registry import (
    OPS,
    BackendUnavailableError,
    Request,
    Unusable,
    dispatch,
    register_impl,
)
from tilegym_rmsnorm.commands import doctor
from tilegym_rmsnorm.integrations.fx import replace_rmsnorm_pass
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPS
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE, VLLM
from tilegym_rmsnorm.settings import (
    AUTO_ORDER,
    NAMES,
    BackendName,
    get_current_backend,
    set_backend,
    use_backend,
)

REQUEST = Request(torch.device("cpu"), torch.float32, torch.float32, "once")
X = torch.ones(2, 8)
CUDA_REQUEST = REQUEST._replace(device=torch.device("cuda", 0))
KNOWN = ", ".join(map(repr, (*AUTO_ORDER, "auto")))


class _Probe:
    """A backend that is usable or not as told, implemented by an empty module."""

    IMPLEMENTATION = "tilegym_rmsnorm.backends"

    def __init__(self, unusable=None):
        self.answer = unusable

    def unusable(self, request):
        return self.answer


@pytest.fixture
def fake_backends(monkeypatch):
    """Usable by default, each with an implementation that returns its own name; a test breaks the ones it wants."""
    probes = {name: _Probe() for name in AUTO_ORDER}
    monkeypatch.setattr(registry, "_probe", probes.__getitem__)
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(
        registry, "_impls", {(op, name): (lambda name=name: name) for op in OPS for name in AUTO_ORDER}
    )
    return probes


def _chosen(backend=None, request=CUDA_REQUEST):
    return dispatch("rms_norm_forward", request, backend)()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_backend_is_asked_with_the_width_and_the_alignment(fake_backends, monkeypatch, backward):
    asked = []
    for probe in fake_backends.values():
        monkeypatch.setattr(probe, "unusable", lambda request: asked.append(request))

    def properties(x, other=None, n=8, heads=0):
        asked.clear()
        if backward:
            tensors = x, x, None, torch.ones(1), other
            registry.backward_of(Spec(n, 1e-6, 0.0, "once", heads=heads), tensors, Wanted(x.dtype), "triton")
        else:
            registry.implementations_of(
                Spec(n, 1e-6, 0.0, "once", heads=heads), (x, None, None, other), "triton"
            )
        (request,) = asked
        registry._chosen.clear()
        return request.n, request.is_aligned

    packed, odd = torch.ones(4, 8), torch.ones(4, 9)
    assert properties(packed) == (8, True) and properties(odd, n=9) == (9, False)
    assert properties(odd[:, :8]) == (8, False), "the second row begins at 36 bytes"
    assert properties(torch.ones(4, 12)[:, :8]) == (8, True)
    assert properties(torch.ones(33)[1:].view(4, 8)) == (8, False)
    assert properties(packed, torch.ones(33)[1:].view(4, 8)) == (8, False), "the other tensor's rows"
    assert properties(torch.ones(2, 3, 24)[..., :8]) == (8, True)
    assert properties(torch.ones(2, 3, 4, 9)[..., :8], heads=4) == (8, False)
    assert properties(torch.ones(2, 2, 4), n=8) == (8, True)
    assert properties(torch.ones(1, 9)[:, :8]) == (8, True), "a single row"
    assert properties(torch.ones(1, 5).expand(4, 5), n=5) == (5, False), "a packed copy is read"
    assert properties(torch.ones(4, 20)[:, ::4], n=5) == (5, False)


def test_auto_takes_the_first_usable_in_order(fake_backends):
    expected = list(AUTO_ORDER)
    while expected:
        registry._chosen.clear()
        assert _chosen() == expected[0]
        fake_backends[expected.pop(0)].answer = Unusable("broken for the test", "none")
    registry._chosen.clear()
    with pytest.raises(BackendUnavailableError, match="cutile: broken.*triton: broken.*torch"):
        _chosen()


def test_auto_skips_a_backend_without_the_op(fake_backends, caplog, monkeypatch):
    del registry._impls["rms_norm_forward", AUTO_ORDER[0]]
    monkeypatch.setattr(registry, "_told", set())
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        assert _chosen() == AUTO_ORDER[1]
    assert f"not {AUTO_ORDER[0]}: has no rms_norm_forward" in caplog.text
    with pytest.raises(BackendUnavailableError, match=f"'{AUTO_ORDER[0]}' has no rms_norm_forward"):
        _chosen(AUTO_ORDER[0])


def test_auto_skips_what_runs_on_a_cpu_by_name_only(fake_backends):
    assert _chosen(request=CUDA_REQUEST) == "cutile"
    assert _chosen(request=REQUEST) == "torch"
    for name in ("cutile", "triton"):
        assert _chosen(name, REQUEST) == name


def test_precedence(fake_backends, monkeypatch):
    fake_backends["cutile"].answer = Unusable("none here", "buy one")
    assert get_current_backend() == "auto" and _chosen() == "triton"
    monkeypatch.setenv("TILEGYM_RMSNORM_BACKEND", "torch")
    assert _chosen() == "torch"
    set_backend("triton")
    assert get_current_backend() == _chosen() == "triton"
    with use_backend("torch"):
        assert _chosen() == "torch"
        with use_backend("auto"):  # an explicit "auto" is a choice too
            assert get_current_backend() == "auto" and _chosen() == "triton"
        assert _chosen("triton") == "triton"
        assert get_current_backend() == "torch"
    assert _chosen() == "triton"
    set_backend(None)
    assert _chosen() == "torch"


def test_use_backend_stays_in_its_thread():
    seen = []
    with use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(get_current_backend()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


@pytest.mark.parametrize("name", AUTO_ORDER)
def test_a_named_backend_never_falls_back(fake_backends, name):
    fake_backends[name].answer = Unusable("no such chip", "buy one")
    with pytest.raises(BackendUnavailableError) as error:
        _chosen(name)
    for part in (name, "rms_norm_forward", "cuda:0", "torch.float32", "no such chip", "buy one"):
        assert part in str(error.value)
    with use_backend(name), pytest.raises(BackendUnavailableError):
        _chosen()


@pytest.mark.parametrize("level", [BATCH | VLLM, BATCH | DEVICE | VLLM])
def test_vllms_order_is_tritons(level):
    """So "auto" takes Triton, as for any other reason."""
    from tilegym_rmsnorm.backends import cutile

    problem = cutile.unusable(CUDA_REQUEST._replace(reproducible=level))
    assert problem is not None and problem.reason == "the compiler owns the order of its sums"
    other = cutile.unusable(CUDA_REQUEST._replace(reproducible=3))
    assert other is None or other.reason != problem.reason


def test_the_log_says_what_was_chosen_and_why_not_the_others(fake_backends, caplog, monkeypatch):
    """The one way to see why a call is slow: nothing else names what "auto" took."""
    fake_backends["cutile"].answer = Unusable("no such chip", "buy one")
    monkeypatch.setattr(registry, "_told", set())
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        for _ in range(2):
            _chosen()
            _chosen("triton", REQUEST)  # whose interpreter is chosen anew in each call
    record, _ = caplog.records
    assert record.message.startswith("rms_norm_forward of torch.float32 x on cuda:0")
    assert "runs on backend triton; not cutile: no such chip (to mend it: buy one)" in record.message


def test_the_log_names_what_a_call_has(caplog, monkeypatch):
    """A call with a residual of x's dtype is another than one without: kernels may take the one alone."""
    for name, empty in (("_told", set()), ("_chosen", {})):
        monkeypatch.setattr(registry, name, empty)
    x, residual, weight = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.rand(2, 8)
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        rms_norm(x, 8, weight[0], backend="torch")
        rms_norm(x, 8, weight[0], residual=residual, backend="torch")
        _, residual_out, rstd = rms_norm_forward(x, weight, bias=weight, residual=residual, backend="torch")
        rms_norm_backward(residual_out, x, weight, rstd, needs_db=True, backend="torch")
    said = [record.message.split(", ", 1)[1].split(", casting")[0] for record in caplog.records]
    assert said == [
        "torch.float32 weight",
        "torch.float32 weight, residual",
        "torch.float32 weight, residual, bias, weights of heads",
        "torch.float32 weight, bias, weights of heads",
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", None),
        ("auto", None),
        (" torch\n", None),
        (
            "nope",
            r"calls that name no backend fail: TILEGYM_RMSNORM_BACKEND.*'nope'\. To mend it: unset TILEGYM_R",
        ),
        (
            "inductor",
            r"got 'inductor', which is gone: use torch\.compile .*\. To mend it: unset TILEGYM_RMSNORM_BACKEND",
        ),
        (
            "triton",
            r"ask for triton, which does not work: no triton here\. To mend it: unset TILEGYM_RMSNORM_BACKEND",
        ),
    ],
)
def test_doctor_looks_at_the_backend_of_the_environment(monkeypatch, value, problem):
    """doctor passed, though every call that names no backend would raise."""
    monkeypatch.setenv(settings.BACKEND_VARIABLE, value)
    backends = {name: {"works": name != "triton", "reason": f"no {name} here"} for name in AUTO_ORDER}
    said = doctor.default_problem(backends)
    assert said is None if problem is None else re.search(problem, said)


def test_a_choice_is_made_once(fake_backends, monkeypatch):
    first = dispatch("rms_norm_forward", CUDA_REQUEST)
    monkeypatch.setattr(registry, "_choose", lambda *_: pytest.fail("chosen again"))
    assert dispatch("rms_norm_forward", Request(*CUDA_REQUEST)) is first


def test_no_more_choices_are_kept_than_fit(fake_backends, monkeypatch):
    monkeypatch.setattr(registry, "MOST_CHOICES", 4)
    for n in range(1, 12):
        assert _chosen(request=CUDA_REQUEST._replace(n=n)) == "cutile"
        assert len(registry._chosen) <= 4


@pytest.mark.parametrize("name", ["cutile", "triton"])
def test_the_choice_of_an_interpreter_is_made_anew(fake_backends, name):
    """An environment that asks for it no longer must count in the next call."""
    assert _chosen(name, REQUEST) == name
    fake_backends[name].answer = Unusable("no interpreter asked for", "ask")
    with pytest.raises(BackendUnavailableError, match="no interpreter asked for"):
        _chosen(name, REQUEST)


def _by_a_module(name):
    module = RMSNorm(8)
    module.backend = name
    return module(X)


DOORS = {
    "rms_norm": lambda name: rms_norm(X, 8, backend=name),
    "rms_norm_forward": lambda name: rms_norm_forward(X, None, backend=name),
    "rms_norm_backward": lambda name: rms_norm_backward(X, X, None, X[:, 0], backend=name),
    "the op": lambda name: torch.ops.tilegym_rmsnorm.rms_norm_forward(
        X, None, None, None, 1, 1e-6, 0.0, "once", 1.0, None, None, name
    ),
    "torch.compile": lambda name: torch.compile(rms_norm, backend="eager")(X, 8, backend=name),
    "make_fx": lambda name: make_fx(lambda x: rms_norm(x, 8, backend=name))(X),
    "set_backend": set_backend,
    "use_backend": use_backend,
    "RMSNorm": lambda name: RMSNorm(8, backend=name),
    "RMSNorm.configured": lambda name: RMSNorm.configured(backend=name),
    "an attribute": _by_a_module,
    "patch_model": lambda name: patch_model(torch.nn.Identity(), backend=name),
    "replace_rmsnorm_pass": lambda name: replace_rmsnorm_pass(
        torch.fx.symbolic_trace(torch.nn.Identity()), backend=name
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "instead"),
    [("cuda", ""), ("inductor", ', which is gone: use torch.compile around calls with backend="torch"')],
)
def test_unknown_names_are_refused_with_the_known_ones(door, name, instead):
    torch._dynamo.reset()
    with pytest.raises(ValueError) as error:
        DOORS[door](name)
    assert str(error.value) == f"backend: expected one of {KNOWN}, got {name!r}{instead}"


def test_the_type_of_names_has_each_and_any_other_text():
    names, other = get_args(BackendName)
    assert sorted(get_args(names)) == sorted(NAMES) and other is str


def test_the_environment_names_a_backend_that_is_gone():
    """The first call of a process raises."""
    program = "import torch, tilegym_rmsnorm; tilegym_rmsnorm.rms_norm(torch.ones(2, 8), 8)"
    environment = os.environ | {"TILEGYM_RMSNORM_BACKEND": "inductor"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.stderr.splitlines()[-1] == (
        f"ValueError: TILEGYM_RMSNORM_BACKEND: expected one of {KNOWN}, got 'inductor', which is gone: "
        'use torch.compile around calls with backend="torch"'
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.compile(rms_norm, backend="eager")(X, 8),
        lambda: RMSNorm(8)(X),
        lambda: torch.nn.functional.rms_norm(X, (8,)),
    ],
    ids=["torch.compile", "RMSNorm", "F.rms_norm under override_aten"],
)
def test_other_calls_with_that_environment(call, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TILEGYM_RMSNORM_BACKEND", "inductor")
    with override_aten("cpu"), pytest.raises(ValueError, match="TILEGYM_.*use torch.compile around calls"):
        call()


def test_other_names_are_refused_with_the_known_ones(monkeypatch):
    with pytest.raises(ValueError, match="backend: expected one of"):
        dispatch("rms_norm_forward", REQUEST, ["torch"])
    with pytest.raises(ValueError, match="op: expected one of 'rms_norm_forward', .*, got 'norm'"):
        dispatch("norm", REQUEST)
    with pytest.raises(ValueError, match="op: expected"):
        tilegym_rmsnorm.get_available_backends_for_op("norm")
    with pytest.raises(ValueError, match="backend: expected"):
        tilegym_rmsnorm.is_backend_available("auto")
    monkeypatch.setenv("TILEGYM_RMSNORM_BACKEND", "cuda")
    with pytest.raises(ValueError, match="TILEGYM_RMSNORM_BACKEND: expected one of"):
        get_current_backend()


def test_a_second_registration_is_refused():
    dispatch("rms_norm_forward", REQUEST, "torch")
    with pytest.raises(ValueError, match="registered already, by tilegym_rmsnorm.backends.torch_reference"):
        register_impl("rms_norm_forward", "torch")(lambda: None)
    with pytest.raises(ValueError, match="op: expected one of"):
        register_impl("norm", "torch")
    with pytest.raises(ValueError, match="backend: expected one of"):
        register_impl("rms_norm_forward", "auto")


def test_auto_on_a_cpu_is_the_reference():
    assert dispatch("rms_norm_forward", REQUEST) is dispatch("rms_norm_forward", REQUEST, "torch")
    assert dispatch("rms_norm_backward", REQUEST) is dispatch("rms_norm_backward", REQUEST, "torch")


def test_auto_on_a_gpu_is_the_reference_for_what_no_kernel_takes():
    request = CUDA_REQUEST._replace(dtype=torch.float64, weight_dtype=None)
    for op in OPS:
        assert dispatch(op, request, "auto") is dispatch(op, request, "torch")


def test_auto_takes_the_kernels_of_rope(monkeypatch):
    monkeypatch.setattr(registry, "why_unusable", lambda backend, request=None: None)
    for op in ROPE_OPS:
        assert dispatch(op, CUDA_REQUEST, "auto") is dispatch(op, CUDA_REQUEST, "cutile")


@pytest.mark.parametrize("name", ["cutile", "triton"])
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16, "weight_dtype": torch.float64},
        {"weight_dtype": torch.float64},
        {"other_dtypes": (torch.float64,)},
        {"device": torch.device("meta")},
    ],
)
def test_the_fused_backends_say_what_they_do_not_take(name, change):
    unusable = registry.why_unusable(name, REQUEST._replace(**change))
    assert unusable is not None and unusable.reason and unusable.remedy


def test_the_torch_backend_takes_anything():
    for device in ("cpu", "cuda", "meta"):
        request = Request(torch.device(device), torch.float16, torch.float64, "llama", (torch.bfloat16,))
        assert registry.why_unusable("torch", request) is None


def test_info_names_every_backend_and_its_state():
    info = tilegym_rmsnorm.get_registry_info()
    assert (
        info["ops"] == list(OPS) and info["current"] == "auto" and list(info["backends"]) == list(AUTO_ORDER)
    )
    for name, state in info["backends"].items():
        assert state["usable"] == tilegym_rmsnorm.is_backend_available(name)
        assert state["usable"] == (state["reason"] is None) == (state["remedy"] is None)
    usable = [name for name, state in info["backends"].items() if state["usable"]]
    assert tilegym_rmsnorm.get_available_backends() == usable
    assert tilegym_rmsnorm.get_available_backends_for_op("rms_norm_backward") == usable
    assert usable[-1] == "torch"


def test_importing_and_running_on_a_cpu_loads_torch_alone():
    """Patches and adapters do not import the libraries that they are for."""
    code = """
import sys, torch
before = set(sys.modules)
import tilegym_rmsnorm
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert not loaded - sys.stdlib_module_names - {"tilegym_rmsnorm"}, loaded
assert not [name for name in sys.modules if name.startswith("tilegym_rmsnorm.integrations.")]
tilegym_rmsnorm.rms_norm(torch.ones(2, 8), (8,))
assert "triton" not in sys.modules and "cuda.tile" not in sys.modules
from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm
others = "tilegym quack liger_kernel vllm flashinfer apex transformer_engine triton cuda.tile".split()
assert not set(others) & set(sys.modules)
report = tilegym_rmsnorm.patch_model(torch.nn.Sequential(torch.nn.RMSNorm(8)))
assert report.counts["patched"] == 1 and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    for name in tilegym_rmsnorm.__all__:
        assert getattr(tilegym_rmsnorm, name).__doc__
    assert tilegym_rmsnorm.__version__
    with pytest.raises(AttributeError, match="'tilegym_rmsnorm' has no attribute 'rmsnorm'"):
        _ = tilegym_rmsnorm.rmsnorm


def test_completion_offers_the_public_names_alone():
    assert dir(tilegym_rmsnorm) == sorted(tilegym_rmsnorm.__all__)
