"""The environment that Ray's workers need.

A worker does not have the environment of the driver, unless it runs on the driver's machine. So
HANGWATCH_URL, HANGWATCH_TOKEN and the job's name have to be passed on::

    ray.init(runtime_env=make_runtime_env(job="run7"))

or, for one run of Ray Train only, ``RunConfig(worker_runtime_env=make_runtime_env(job="run7"))``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_PREFIX = "HANGWATCH_"


def make_runtime_env(
    runtime_env: Mapping[str, Any] | None = None, *, job: str | None = None
) -> dict[str, Any]:
    """A ``runtime_env`` with this process's HANGWATCH_* variables, added to that of the argument.
    Variables of the argument are kept. ``job`` is the name of the job on the dashboard.
    """
    combined = dict(runtime_env or {})
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    if job is not None:
        variables["HANGWATCH_JOB"] = job
    combined["env_vars"] = variables | dict(combined.get("env_vars") or {})
    return combined
