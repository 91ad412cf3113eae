"""Versions that are known to hang."""

from __future__ import annotations

import pytest

from hangwatch.model.hardware import KNOWN_PROBLEMS, KnownProblem, find_known_problems


@pytest.mark.parametrize(
    ("component", "version", "machine", "fixed"),
    [
        ("torch", "2.7.0+cu126", "x86_64", [(2, 7, 1)]),
        ("torch", "2.7.1", "x86_64", []),
        ("torch", "2.6.0", "x86_64", []),
        ("nccl", "2.21.5", "x86_64", [(2, 22, 3), (2, 26, 2)]),
        ("nccl", "2.28.9", "x86_64", []),
        ("nccl", "2.28.9", "aarch64", [(2, 29, 3)]),
        ("nccl", "2.30.4", "x86_64", [(2, 30, 7)]),
        ("nccl", "2.30.7", "x86_64", []),
        ("nccl", "unknown", "x86_64", []),
        ("nccl", "v2.21.5", "x86_64", []),
        ("driver", "2.28.9", "aarch64", []),
    ],
)
def test_problems_of_a_version(
    component: str, version: str, machine: str, fixed: list[tuple[int, ...]]
) -> None:
    found = find_known_problems(component, version, machine)
    assert [known.fixed for known in found] == fixed


def test_text_has_the_remedy_and_the_source() -> None:
    (known,) = find_known_problems("torch", "2.7.0")
    assert known.describe("2.7.0") == (
        "torch 2.7.0 is known to hang at times in communicators made with"
        " init_process_group(device_id=...); 2.7.1 has the fix"
        " (https://github.com/pytorch/pytorch/issues/153960). Without an upgrade:"
        " TORCH_NCCL_USE_COMM_NONBLOCKING=0."
    )


@pytest.mark.parametrize("known", KNOWN_PROBLEMS, ids=lambda known: known.source)
def test_entry_is_complete(known: KnownProblem) -> None:
    assert known.first < known.fixed
    assert known.source.startswith("https://")
    assert not known.problem.endswith(".")
