# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Records and results of the benchmark, as tests make them."""

import os
from pathlib import Path
from typing import Any

from bench.measure.check import checked_ops, run_op

RECORD_FIELDS = {
    *("op", "rows", "cols", "dtype", "provider", "us", "us_p10", "us_p90", "samples", "gb_per_s"),
    *("copy_fraction", "host_us", "errors", "workspace_bytes", "error"),
    *("settings", "tried_us", "first_calls_s", "level_ratio"),
}


BYTES = 200e6  # that a call of 4096x1024 moves


def make_record(us: float | None = 100.0, **changes: Any) -> dict[str, Any]:
    record = {"op": "backward", "rows": 4096, "cols": 1024, "dtype": "bfloat16", "provider": "cutile"}
    record |= {"us": us, "us_p10": us, "us_p90": us, "samples": 31}
    record |= {"copy_fraction": us and 0.66, "errors": {"y": 0.004, "dx": 0.004}}
    record |= {"workspace_bytes": 0, "error": None if us else "ValueError: broken"} | changes
    us, moved = record["us"], BYTES * record["rows"] * record["cols"] / (4096 * 1024)
    host_us = us and 24.0 + len(
        record["provider"]
    )  # another of each provider, for a table that mixes them up
    return {"gb_per_s": us and round(moved / us / 1e3, 1), "host_us": host_us} | record


def make_result(
    *records: dict[str, Any], gpu: str | None = "NVIDIA H100 80GB HBM3", **changes: Any
) -> dict[str, Any]:
    result = {
        "gpu": gpu,
        "driver": "580.1",
        "cuda": "13.0",
        "tileiras": "13.4.92",
        "versions": {"torch": "2.11.0"},
    }
    result |= {"commit": "0123456789abcdef", "dirty": False, "date": "2026-11-21T10:00:00+00:00"}
    return (
        result
        | {"copy_gb_per_s": 3009.0, "note": None, "unavailable": {}, "records": list(records)}
        | changes
    )


def make_block(*records, **changes):
    """A result of `bench/run.sh --block`."""
    return make_result(*records, is_block=True, **changes)


def cell(us, peer, op, name="quack", **changes):
    """The records of an op by this package and by a peer, of these us."""
    return [make_record(us, op=op, **changes), make_record(peer, op=op, provider=name, **changes)]


def run_all(provider, inputs):
    """Run every op that the provider offers, and "both" by autograd, with `run_op`."""
    return {name: each for op in checked_ops(provider) for name, each in run_op(provider, op, inputs).items()}


def assert_golden(text: str, name: str) -> None:
    """The text is that of tests/bench/golden/NAME. With WRITE_GOLDEN=1 the file becomes the text."""
    path = Path(__file__).parents[1] / "bench" / "golden" / name
    if os.environ.get("WRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{path} has other text. To write it anew: WRITE_GOLDEN=1 pytest"
    )
