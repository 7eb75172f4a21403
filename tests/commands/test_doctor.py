# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`python -m tilegym_rmsnorm doctor`: its verdict, its exit status, and that no broken installation stops it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from table_cases import BUCKET, ENTRY, TARGET, VARIANT, entry_of, ship

from tilegym_rmsnorm import __main__, functional, settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.runtime import tables, toolchain
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE
from tilegym_rmsnorm.backends.registry import Unusable
from tilegym_rmsnorm.commands import doctor, installation
from tilegym_rmsnorm.commands.installation import Gpu
from tilegym_rmsnorm.reproducibility import set_reproducible

ROOT = Path(__file__).resolve().parents[2]
H100, T4 = Gpu("an H100", "sm_90"), Gpu("a T4", "sm_75")
RAN = {"works": True, "device": "cuda:0", "errors": {"y": 1e-7, "dx": 2e-7}, "seconds": 1.5}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """Call it to have these GPUs, and these backends unusable; the kernels of the others work, unless said."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def have(gpus=(), hidden_from_torch=(), unusable=None, results=None) -> None:
        monkeypatch.setattr(installation, "torch_gpus", lambda: list(gpus))
        monkeypatch.setattr(installation, "driver_gpus", lambda: ([*gpus, *hidden_from_torch], "580.1"))
        monkeypatch.setattr(registry, "why_unusable", lambda name, request=None: (unusable or {}).get(name))
        monkeypatch.setattr(doctor, "run_kernels_apart", lambda name: (results or {}).get(name, RAN))

    return have


def run_doctor(capsys: pytest.CaptureFixture, *options: str) -> tuple[int, str]:
    status = __main__.main(["doctor", *options])
    return status, capsys.readouterr().out


NO_CUTILE = {"cutile": Unusable("cuda-tile is not installed", 'pip install "cuda-tile>=1.7,<1.8"')}
BROKEN = {"works": False, "reason": "its process ended by SIGSEGV: no message", "remedy": "reinstall it"}


@pytest.mark.parametrize(
    ("gpus", "unusable", "results", "best", "status"),
    [
        ([H100], {}, {}, "cutile", 0),
        ([H100], NO_CUTILE, {}, "cutile", 1),
        ([H100], {}, {"cutile": BROKEN}, "cutile", 1),
        ([H100], {}, {"triton": BROKEN}, "cutile", 0),
        ([T4, H100], {}, {}, "cutile", 0),
        ([T4], NO_CUTILE, {}, "triton", 0),
        ([T4], NO_CUTILE, {"triton": BROKEN}, "triton", 1),
        ([], NO_CUTILE, {"triton": BROKEN}, "torch", 0),
        ([], {}, {"torch": BROKEN}, "torch", 1),
    ],
)
def test_verdict_is_about_the_best_possible_backend(fake, capsys, gpus, unusable, results, best, status):
    fake(gpus, unusable=unusable, results=results)

    got, output = run_doctor(capsys)

    ending = "works" if status == 0 else "does not work"
    assert got == status
    verdict = (
        f"The best backend possible on this machine is {best}"
        if gpus
        else 'For CPU tensors "auto" takes torch'
    )
    assert output.splitlines()[-1].endswith(f"{ending}.") and verdict in output.splitlines()[-1]


def test_without_a_gpu_it_says_what_runs_there(fake, capsys):
    """A kernel in its interpreter, which "auto" never takes there, is usable by name."""
    ran = RAN | {"device": "cpu"}
    fake(unusable=NO_CUTILE, results={"triton": ran, "torch": ran})
    request = registry.Request(torch.device("cpu"), torch.float32, torch.float32, "once")
    assert registry._is_of(("torch",), registry.dispatch("rms_norm_forward", request, "auto"))

    _, output = run_doctor(capsys)

    assert "backends, fastest first on a GPU\n" in output
    assert "triton           usable by name: ran on cpu" in output
    assert "torch            usable: ran on cpu" in output
    assert "best" not in output
    last = output.splitlines()[-1]
    assert last.startswith(
        "No GPU is seen here: the kernels of cutile and triton need one, or their interpreters."
    )
    assert last.endswith('For CPU tensors "auto" takes torch, plain PyTorch, and it works.')


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("inductor", "use torch.compile around calls with backend="),
        ("cuda", "expected one of 'cutile', 'triton', 'torch', got 'cuda'\n"),
        ("auto", "expected one of 'cutile', 'triton', 'torch', got 'auto'\n"),
    ],
)
def test_backends_that_there_are_not(capsys, name, said):
    with pytest.raises(SystemExit, match="^2$"):
        __main__.main(["doctor", "--backend", name])
    assert said in capsys.readouterr().err


def test_on_a_gpu_nothing_is_said_of_cpu_tensors(fake, capsys):
    fake([H100])
    _, output = run_doctor(capsys)
    assert "backends, fastest first\n" in output and "by name" not in output and "CPU tensors" not in output


def test_says_why_not_and_what_mends_it(fake, capsys):
    fake([H100], unusable=NO_CUTILE, results={"triton": BROKEN})

    _, output = run_doctor(capsys)

    assert "not usable: cuda-tile is not installed" in output
    assert 'to mend it: pip install "cuda-tile>=1.7,<1.8"' in output
    assert "not usable: its process ended by SIGSEGV" in output
    assert "to mend it: reinstall it" in output
    assert output.count("usable: ran on cuda:0") == 1


def test_gpu_that_pytorch_does_not_see(fake, capsys, monkeypatch):
    fake(hidden_from_torch=[H100], unusable={"cutile": Unusable("this PyTorch is built without CUDA", "...")})
    status, output = run_doctor(capsys)
    assert status == 1
    assert "an H100 (sm_90), not seen by PyTorch" in output

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, output = run_doctor(capsys)
    assert status == 0
    assert "hidden by CUDA_VISIBLE_DEVICES" in output


@pytest.mark.parametrize(("gpus", "ignored"), [([H100], True), ([], False)])
def test_interpreters_do_not_pass_for_a_gpu(fake, capsys, monkeypatch, gpus, ignored):
    fake(hidden_from_torch=gpus)
    for name in doctor.INTERPRETERS:
        monkeypatch.setenv(name, "1")
    seen = []
    no_cuda = Unusable("this PyTorch is built without CUDA", "...")

    def why_unusable(name, request=None):
        seen.append({name for name in doctor.INTERPRETERS if name in os.environ})
        return None if seen[-1] else no_cuda

    monkeypatch.setattr(registry, "why_unusable", why_unusable)

    status, output = run_doctor(capsys)

    assert all(bool(names) is not ignored for names in seen) and seen
    assert status == int(ignored)
    assert ("ignored here" in output) is ignored
    assert all(os.environ[name] == "1" for name in doctor.INTERPRETERS)


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "0"), ("8", "8"), ("all", "TILEGYM_RMSNORM_SM_MARGIN: expected a number of SMs")],
)
def test_says_how_many_sms_are_left_free(fake, capsys, monkeypatch, value, said):
    fake()
    if value is not None:
        monkeypatch.setenv(settings.SM_MARGIN_VARIABLE, value)
    settings.set_sm_margin(None)
    try:
        _, output = run_doctor(capsys)
    finally:
        monkeypatch.undo()
        settings.set_sm_margin(None)
    [line] = [line for line in output.splitlines() if line.startswith("  SMs left free")]
    assert said in line


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "run"),
        ("device,vllm", "device,vllm"),
        ("all", "TILEGYM_RMSNORM_REPRODUCIBLE: expected one of 'run',"),
    ],
)
def test_says_which_level_is_in_effect(fake, capsys, monkeypatch, value, said):
    fake()
    if value is not None:
        monkeypatch.setenv(settings.REPRODUCIBLE_VARIABLE, value)
    set_reproducible(None)
    try:
        _, output = run_doctor(capsys)
    finally:
        monkeypatch.undo()
        set_reproducible(None)
    [line] = [line for line in output.splitlines() if line.startswith("  reproducible ")]
    assert said in line


def test_names_variables_that_nothing_reads(fake, capsys, monkeypatch):
    fake()
    assert "  environment " not in run_doctor(capsys)[1]
    monkeypatch.setenv("TILEGYM_RMSNORM_BACKED", "torch")
    status, output = run_doctor(capsys)
    [line] = [line for line in output.splitlines() if line.startswith("  environment ")]
    assert status == 0 and line.endswith(
        " got TILEGYM_RMSNORM_BACKED (TILEGYM_RMSNORM_BACKEND?), which changes nothing"
    )
    assert all(name in line for name in settings.VARIABLES)


def test_names_a_conflict_of_cuda_home(fake, capsys, monkeypatch):
    fake([H100])
    found = toolchain.Tileiras("/toolkit/bin/tileiras", "PATH", (13, 4, 92), inherits_cuda_home=True)
    monkeypatch.setattr(toolchain, "find_tileiras", lambda: found)
    monkeypatch.setattr(toolchain, "cuda_home_conflict", lambda: "which is CUDA 12.4, older than tileiras")
    monkeypatch.setenv("CUDA_HOME", "/old")

    _, output = run_doctor(capsys)

    assert "13.4.92, from PATH: /toolkit/bin/tileiras" in output
    assert "/old, in conflict: which is CUDA 12.4, older than tileiras" in output


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "not installed"),
        ("1.7.2", "1.7.2"),
        *(
            (other, f'{other}: {state}; expected >=1.7,<1.8. To mend it: pip install "cuda-tile>=1.7,<1.8"')
            for other, state in (("1.6.9", "not usable"), ("1.8.0", "not tested"), ("2.0.0rc1", "not usable"))
        ),
    ],
)
def test_says_which_cuda_tile_is_not_tested(fake, capsys, monkeypatch, version, said):
    fake([H100])
    real = toolchain.package_version
    monkeypatch.setattr(
        toolchain, "package_version", lambda name: version if name == "cuda-tile" else real(name)
    )

    status, output = run_doctor(capsys)

    assert status == 0 and f"  cuda-tile        {said}\n" in output


def test_broken_parts_are_named_and_the_rest_still_answers(fake, capsys, monkeypatch):
    fake()

    def broken(*_):
        raise OSError("libsomething.so: cannot open shared object file")

    monkeypatch.setattr(toolchain, "find_tileiras", broken)
    monkeypatch.setattr(registry, "why_unusable", lambda name: broken() if name == "triton" else None)
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "nonsense")

    status, output = run_doctor(capsys)

    assert status == 1, "every call that names no backend fails"
    assert "unknown: OSError: libsomething.so: cannot open shared object file" in output
    assert "not usable: OSError: libsomething.so: cannot open shared object file" in output
    assert "unknown: ValueError: TILEGYM_RMSNORM_BACKEND" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "options", [(), ("--json",), ("--backend", "torch"), ("--backend", "torch", "--json")]
)
@pytest.mark.parametrize(
    "variable", [settings.TEAMS_VARIABLE, settings.SM_MARGIN_VARIABLE, settings.REPRODUCIBLE_VARIABLE]
)
def test_a_variable_that_means_nothing_is_named_before_any_kernel_runs(
    fake, capsys, monkeypatch, variable, options
):
    fake([H100])
    monkeypatch.setattr(doctor, "check_backend", lambda name: pytest.fail(f"{name} ran"))
    monkeypatch.setenv(variable, "maybe")
    settings.set_teams(None)
    settings.set_sm_margin(None)
    set_reproducible(None)
    try:
        status, output = run_doctor(capsys, *options)
    finally:
        monkeypatch.undo()
        settings.set_teams(None)
        settings.set_sm_margin(None)
        set_reproducible(None)
    assert status == 1 and "Traceback" not in output
    if "--json" in options:
        answer = json.loads(output)
        said = answer["reason" if "--backend" in options else "problem"]
        assert answer["works"] is False
    else:
        said = output.splitlines()[-1]
    assert f"{variable}: expected " in said and "got 'maybe'" in said


def test_json_holds_all_that_the_text_says(fake, capsys):
    fake([H100], unusable=NO_CUTILE)

    status, output = run_doctor(capsys, "--json")

    report = json.loads(output)
    assert status == 1
    assert report["works"] is False and report["best_possible"] == "cutile"
    assert report["machine"]["GPU"] == "an H100 (sm_90)"
    assert report["machine"]["driver"].startswith("580.1")
    assert report["backends"]["cutile"] == {"works": False, **NO_CUTILE["cutile"]._asdict()}
    assert report["backends"]["triton"] == RAN


@pytest.mark.parametrize("spoil", [lambda dw: dw * 1.001, lambda dw: dw * float("nan")])
def test_wrong_results_are_not_usable(monkeypatch, spoil):
    right = functional.rms_norm_backward

    def wrong(*arguments, **options):
        dx, dw = right(*arguments, **options)
        return dx, spoil(dw)

    monkeypatch.setattr(functional, "rms_norm_backward", wrong)

    result = doctor.run_kernels("torch")

    assert not result["works"]
    assert result["reason"].startswith("wrong results: dw by")


def test_failure_of_one_backend_shows_its_traceback(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("failed to compile\nTile IR program")

    monkeypatch.setattr(functional, "rms_norm_forward", broken)

    status, output = run_doctor(capsys, "--backend", "torch")
    assert status == 1
    assert "Traceback" in output and "in broken" in output

    _, output = run_doctor(capsys, "--backend", "torch", "--json")
    assert json.loads(output)["reason"] == "RuntimeError: failed to compile Tile IR program"


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "reason"),
    [
        (-signal.SIGSEGV, "", "", "its process ended by SIGSEGV: no message"),
        (
            1,
            "",
            "Traceback\nImportError: libcuda",
            "its process ended with exit status 1: ImportError: libcuda",
        ),
    ],
)
def test_process_that_dies_is_reported(monkeypatch, status, stdout, stderr, reason):
    died = subprocess.CompletedProcess([], status, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)

    assert doctor.run_kernels_apart("triton")["reason"] == reason


def test_process_that_hangs_is_reported(monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)

    assert doctor.run_kernels_apart("triton")["reason"] == "its kernels took more than 300 s"


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        ("580.1, 9.0, NVIDIA H100, 80GB", 0, ([Gpu("NVIDIA H100, 80GB", "sm_90")], "580.1")),
        ("NVIDIA-SMI has failed because it could not communicate with the driver", 9, ([], None)),
        ("No devices were found", 0, ([], None)),
    ],
)
def test_driver_is_asked_by_nvidia_smi(tmp_path, monkeypatch, answer, status, expected):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert installation.driver_gpus() == expected


def test_says_which_entries_serve_the_gpu(fake, capsys, monkeypatch, folders):
    user, shipped = folders
    fake([H100._replace(name=TARGET.gpu)])

    def said() -> str:
        [line] = [line for line in run_doctor(capsys)[1].splitlines() if line.startswith("  tuned settings")]
        return line.removeprefix("  tuned settings").strip()

    assert said().startswith(f"the rules of plans/; none are for {TARGET} alone: ")
    ship(shipped, TARGET, ENTRY, entry_of(BUCKET._replace(size="few"), VARIANT))
    assert said() == "2 that ship for it, then the rules of plans/"
    path = tables.update(user, TARGET, [ENTRY])
    assert said() == f"1 in {path}, then 2 that ship for it, then the rules of plans/"
    fake([H100._replace(name=TARGET.gpu), H100])
    assert (
        f"{TARGET.gpu}: 1 in {path}, then 2 that ship for it, then the rules of plans/; an H100: the rules"
        in said()
    )
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    fake([H100._replace(name=TARGET.gpu)])
    expected = (
        "2 that ship for it, then the rules of plans/; the user's cache is off (TILEGYM_RMSNORM_CACHE_DIR, "
    )
    assert said().startswith(expected)
