# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Memory and launches of a GPU's machine, asked without a GPU."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from planning import by_rules, plan  # noqa: E402

from tilegym_rmsnorm.backends.cutile.kernels import forward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime import machine  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
VARIANT = by_rules("forward", 1024).first
SIZES = [((3, 5), BF16), ((1, 7), FP32), ((4,), FP32), ((1,), BF16)]


class Driver:
    """One device, number 1, whose memory is the CPU's. `current` is the device that PyTorch would call current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.launches, self.allocated = 1, [], []
        self.properties = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self.properties)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.use)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: (self.current, index), raising=False
        )
        monkeypatch.setattr(machine, "_empty_strided_cuda", self.allocate)
        record = lambda *args, **kwargs: self.launches.append((args, kwargs))  # noqa: E731
        monkeypatch.setattr(machine, "launch_kernel", record)

    @contextlib.contextmanager
    def use(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def allocate(self, size, stride, dtype):
        assert self.current == 1, "memory of another device"
        self.allocated.append(size)
        return torch._C._dynamo.guards._empty_strided_cpu(size, stride, dtype)


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


@pytest.fixture
def gpu(driver):
    return machine.GpuMachine(torch.device("cpu"))


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_memory_is_as_torch_empty_lays_it_out(gpu, driver, size, dtype):
    got, expected = gpu.empty(size, dtype), torch.empty(size, dtype=dtype)
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert driver.allocated == [size] and not got.requires_grad


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_memory_of_a_device_that_is_not_current(gpu, driver, size, dtype):
    driver.current = 0
    got = gpu.empty(size, dtype)
    assert got.shape == size and got.dtype == dtype and not driver.allocated


def test_what_outlives_a_call_has_no_memory(gpu):
    """A first call in a capture takes its memory from a pool of which nothing may be kept (tests/gpu/first_use.py)."""
    kept = [each for each in vars(gpu).values() if isinstance(each, torch.Tensor)]
    assert kept and not any(each.untyped_storage().nbytes() for each in kept)


@pytest.mark.parametrize(("sm_count", "most"), [(132, 16), (114, 14), (16, 2), (8, 1), (7, 1), (4, 1)])
def test_teams_of_eight_launches_at_once_leave_room(driver, sm_count, most):
    """The smallest GPUs have no team, and every entry without one may serve."""
    driver.properties.multi_processor_count = sm_count
    found = machine.GpuMachine(torch.device("cpu"))
    assert found.facts.sm_count == sm_count and found.facts.most_members == most
    assert 8 * (most - 1) < sm_count, "launches, each with all of a team but one"


def test_memory_from_a_torch_without_the_private_function(gpu, driver, monkeypatch):
    monkeypatch.setattr(machine, "_empty_strided_cuda", None)
    assert gpu.empty((3, 5), BF16).shape == (3, 5) and not driver.allocated


def test_this_torch_has_the_private_functions():
    """Calls without them take 4 us longer, and nothing else would say so."""
    assert callable(torch._C._dynamo.guards._empty_strided_cuda)
    assert callable(super(torch.autograd.Function, torch.autograd.Function).apply)


@pytest.mark.parametrize("current", [1, 0])
def test_launches_go_to_the_machines_device_and_its_current_stream(gpu, driver, current):
    launch = gpu.bind(forward.forward_rows, VARIANT, (1024, 0, True))
    driver.current = current
    launch((3,), ("y", "x"))
    [((stream, grid, kernel, arguments), options)] = driver.launches
    assert stream == (1, 1) and grid == (3,) and arguments == ("y", "x", 1024, 0, True)
    assert isinstance(kernel, ct.kernel) and driver.current == current
    assert options == {"programmatic_dependent_launch": True}


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)])
def test_launches_begin_before_the_one_before_has_ended_from_hopper_on(driver, major, minor):
    """Kernels that wait a launch are right, and 0.5 to 1 us late. No other test would tell."""
    driver.properties.major, driver.properties.minor = major, minor
    gpu = machine.GpuMachine(torch.device("cpu"))
    gpu.bind(forward.forward_rows, VARIANT, ())((3,), ())
    [(_, options)] = driver.launches
    assert options == {"programmatic_dependent_launch": major >= 9}
    made = plan(VARIANT, "forward", 1024, facts=gpu.facts)
    assert made.constants(made.first)["DEPENDENT"] is (major >= 9), (
        "a kernel that does not wait, or waits for nothing"
    )


def test_launches_pass_by_what_stands_in_the_place_of_ct_launch(gpu, driver, monkeypatch):
    """`import tilegym` puts a function there that takes no keyword arguments, and hands on to cuda-tile's."""

    def replaced(stream, grid, kernel, kernel_args, /):
        raise AssertionError("not ours to call")

    monkeypatch.setattr(ct, "launch", replaced)
    gpu.bind(forward.forward_rows, VARIANT, (1024, 0, True))((3,), ("y", "x"))
    assert len(driver.launches) == 1


def test_launches_are_cuda_tiles_where_another_library_was_imported_first():
    program = """
import cuda.tile as ct

original = ct.launch
ct.launch = lambda stream, grid, kernel, kernel_args, /: original(stream, grid, kernel, kernel_args)
from tilegym_rmsnorm.backends.cutile.runtime import machine
assert machine.launch_kernel is original and ct.launch is not original
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
