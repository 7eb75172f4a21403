# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Searches in several processes: what comes back from them, who uses the device when, and what ends them."""

import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm import settings  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans import sizes  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime import tables  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning import candidates, search, workers  # noqa: E402

CPU = torch.device("cpu")
SMALL = Bucket("forward", 8, "float32", "few")
UNKNOWN = Bucket("sideways", 8, "float32", "few")


@pytest.fixture(autouse=True)
def what_ships():
    """Is read before `finder` changes the size classes, by which its entries are checked."""
    tables.shipped_records(90)


def start_small(device, turn, teams):
    """Do as conftest.finder does for the interpreter, in another process."""
    tables.shipped_records(90)
    sizes.FEW_ROWS = 8
    search.LARGE, search.RUNS, search.calls_needed = (2 * 48 * 64,), 16, lambda *_: 1
    workers.start(device, turn, teams)


class Deadly(Bucket):
    """Ends the process that receives it."""

    def __reduce__(self):
        return os._exit, (1,)


class Endless(Bucket):
    """Keeps the process that receives it busy."""

    def __reduce__(self):
        return time.sleep, (600,)


def start_without_teams(device, turn, teams):
    start_small(device, turn, teams)
    assert not settings.teams()


@pytest.mark.parametrize("processes", [1, 2])
def test_every_bucket_comes_back(processes, finder):
    """Other processes have the policy of this one: what `set_teams` said no environment tells them."""
    settings.set_teams(False)
    buckets = [SMALL, SMALL._replace(n=16)]
    found = {
        each.bucket: each for each in workers.search_all(buckets, CPU, 1, processes, start_without_teams)
    }
    assert set(found) == set(buckets)
    for bucket, each in found.items():
        [variant] = candidates.candidates(bucket, 90, 1)
        assert each.entry.variant(bucket.n) == variant and not each.failure and not each.lost


def test_what_ships_for_a_bucket_is_tried_whatever_the_number_of_candidates(finder, monkeypatch):
    shipped = ForwardTiles(width=8, warps=4, occupancy=4, latency=7, rows=32)
    monkeypatch.setattr(workers, "shipped_for", lambda bucket: [shipped] if bucket == SMALL else [])
    tried = {}
    for bucket in (SMALL, SMALL._replace(n=16)):
        monkeypatch.setattr(search.Search, "tune", lambda self, *asked: tried.update([asked]))
        list(workers.search_all([bucket], CPU, 2, 1, start_small))
    assert tried[SMALL][1] == shipped and len(tried[SMALL]) == 2
    assert tried[SMALL._replace(n=16)][1] != shipped


def test_no_team_is_tried_where_the_policy_allows_none(finder, monkeypatch):
    """`tune` launches no team where its launch may never end."""
    tried = {}
    monkeypatch.setattr(search.Search, "tune", lambda self, *asked: tried.update([asked]))
    wide = Bucket("backward", 40000, "bfloat16", "large")
    for allowed in (True, False):
        settings.set_teams(allowed)
        assert settings.teams() == allowed
        list(workers.search_all([wide], CPU, 60, 1, start_small))
        assert any(variant.members > 1 for variant in tried[wide]) == allowed


def test_an_error_of_a_process_reaches_the_caller():
    with pytest.raises(KeyError, match="sideways"):
        list(workers.search_all([UNKNOWN], CPU, 1, 2))


def test_a_process_that_dies_ends_the_search():
    with pytest.raises(workers.DiedError, match="a process died"):
        list(workers.search_all([Deadly(*SMALL), SMALL], CPU, 1, 2, start_small))


def test_a_process_that_dies_while_buckets_are_handed_out_ends_the_search(monkeypatch):
    def submit(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", submit)
    with pytest.raises(workers.DiedError, match="a process died"):
        list(workers.search_all([SMALL, SMALL], CPU, 1, 2))


def test_a_search_that_is_left_ends_its_processes():
    others = set(multiprocessing.active_children())
    searches = workers.search_all([Endless(*SMALL), SMALL], CPU, 1, 2, start_small)
    assert next(searches).bucket == SMALL
    processes = set(multiprocessing.active_children()) - others
    assert processes
    searches.close()
    # Not by join: the pool's own thread joins them too, and one of the two sees nothing.
    for process in processes:
        assert connection.wait([process.sentinel], 30), "it still runs"


@pytest.mark.parametrize(
    "error", [search.NothingRightError("none of 3"), ct.TileCompilerTimeoutError("took too long", "", None)]
)
def test_what_fails_one_bucket_is_its_outcome(monkeypatch, error):
    def tune(self, bucket, variants):
        raise error

    monkeypatch.setattr(search.Search, "tune", tune)
    first, second = workers.search_all([SMALL, SMALL], CPU, 1, 1)
    assert first == second and first.entry is None and not first.lost
    assert str(error) in first.failure and str(SMALL) in first.failure


def test_a_lost_context_is_the_last_outcome(monkeypatch):
    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(search.Search, "synchronize", broken)
    monkeypatch.setattr(search.Search, "tune", broken)
    [only] = workers.search_all([SMALL, SMALL], CPU, 1, 1)
    assert only.lost and "the CUDA context is lost: an illegal memory access" in only.failure


class Turn:
    """A lock that says whether it is held."""

    held = False

    def __enter__(self):
        assert not self.held
        self.held = True

    def __exit__(self, *_):
        self.held = False


def test_the_device_works_in_turn_and_compiles_out_of_it(finder, monkeypatch):
    finder.turn = turn = Turn()
    real_sampler, real_check, seen = finder.timer.cold_sampler, finder.why_wrong, []

    def cold_sampler(calls):
        assert not turn.held, "others wait while this process compiles"
        sample = real_sampler(calls)

        def sample_in_turn():
            assert turn.held
            seen.append("sampled")
            return sample()

        return sample_in_turn

    def why_wrong(*arguments):
        assert turn.held
        seen.append("checked")
        return real_check(*arguments)

    monkeypatch.setattr(finder.timer, "cold_sampler", cold_sampler)
    monkeypatch.setattr(finder, "why_wrong", why_wrong)
    variant = ForwardTiles(width=64, warps=4, occupancy=1, latency=2, rows=8)
    assert finder.tune(Bucket("forward", 64, "bfloat16", "large"), [variant]).variant(64) == variant
    assert not turn.held and "sampled" in seen and seen[-1] == "checked"


def test_memory_is_given_back_within_a_turn(finder, monkeypatch):
    """Dead graphs and a check in float64 hold memory: sixteen processes share a GPU."""
    finder.turn, seen = Turn(), []

    def empty_cache():
        assert finder.turn.held, "cudaFree stops what another process times"
        seen.append("emptied")

    def why_wrong(*_):
        seen.append("checked")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(finder, "why_wrong", why_wrong)
    variant = ForwardTiles(width=64, warps=4, occupancy=1, latency=2, rows=8)
    bucket = Bucket("forward", 64, "bfloat16", "large")
    finder.tune(bucket, [variant])
    times = 2 * len(search.rows_of(bucket))  # all, and the fastest again
    assert seen == ["emptied"] * times + ["checked", "emptied"]


def test_a_bucket_for_which_memory_lacks_says_how_to_go_on(monkeypatch):
    def tune(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 256.00 MiB. Process 3784 has 520.00 MiB"
        )

    monkeypatch.setattr(search.Search, "tune", tune)
    [only] = workers.search_all([SMALL], CPU, 1, 1)
    assert only.entry is None and not only.lost
    assert only.failure == (
        f"{SMALL}: out of GPU memory. To mend it: the same command with --skip-tuned and fewer --processes"
    )


def test_processes_are_as_many_as_cores_memory_and_buckets_allow(monkeypatch):
    memory = 40 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory, memory))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert workers.count_processes(CPU, 100) == 4  # and what a turn takes
    assert workers.count_processes(CPU, 2) == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert workers.count_processes(CPU, 100) == 3
    memory = 2**30
    assert workers.count_processes(CPU, 100) == 1
