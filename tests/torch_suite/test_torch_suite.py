"""A part of PyTorch's own DistributedTest comes out the same watched as plain, and gets no alert where
it passes. ``python -m tests.torch_suite`` runs all of it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.harness import native

from .comparison import compare_tests, format_summary, list_tests

SHARES = 12
# Each run takes another share and recorder; the failure's text has the seed, by which they can be repeated.
SEED = int(os.environ.get("TORCH_SUITE_SEED", random.randrange(1000)))


def test_share_of_the_suite_is_the_same_watched(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = list_tests()[SEED % SHARES :: SHARES]
    recorder = ("native", "python")[SEED // SHARES % 2]
    env = native.recorder_env(recorder, tmp_path_factory)
    comparison = compare_tests(names, tmp_path / "suite", env)
    assert not comparison.problems, "\n".join(
        [f"TORCH_SUITE_SEED={SEED}", *format_summary(comparison)]
    )
    assert comparison.count_outcomes("passed") > len(names) / 10
