"""The CUDA builds of torch that the tests here run on; skips where one is not installed."""

from __future__ import annotations

import functools
import os

import pytest

from tests.fakegpu.environment import WheelUnavailableError, environment_folder, install_environment
from tests.harness.environments import is_installed


def require_torch(version: str) -> None:
    """Skip the test unless HANGWATCH_FAKEGPU_DIR names a folder with this CUDA build of torch;
    HANGWATCH_FAKEGPU_FETCH=1 fetches it first.

    Two of these jobs are as much as two cores can run beside other tests, so they run on request.
    """
    is_requested = "HANGWATCH_FAKEGPU_DIR" in os.environ
    folder = environment_folder(version)
    if is_requested and is_installed(folder):
        return
    if os.environ.get("HANGWATCH_FAKEGPU_FETCH") != "1":
        pytest.skip(
            f"runs on request: python -m tests.fakegpu install --torch {version}, then set"
            f" HANGWATCH_FAKEGPU_DIR to {folder.parent}"
        )
    failure = _install(version)
    if failure:
        pytest.skip(failure)


@functools.cache  # or each test would try to fetch it
def _install(version: str) -> str:
    """Why the version cannot be fetched, empty if it is installed."""
    try:
        install_environment(environment_folder(version), version)
    except WheelUnavailableError as error:
        return str(error)
    return ""


@pytest.fixture(params=["2.9.1", "2.14.1"])
def torch_version(request: pytest.FixtureRequest) -> str:
    """Each CUDA build of torch that CI fetches: one of CUDA 12, one of CUDA 13."""
    version = str(request.param)
    require_torch(version)
    return version
