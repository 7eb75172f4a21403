# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""GitHub runs the jobs of ci.yaml: a job that its workflow does not call would never run there."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_github_calls_every_job_and_nothing_else():
    jobs = yaml.safe_load((ROOT / "ci.yaml").read_text(encoding="utf-8"))["jobs"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    called = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    assert called == {name: [f"bash .ci/run {name}"] for name in jobs}
