"""Several servers that share a database, and thereby the jobs: HANGWATCH_URL lists them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from .target import ServerTarget


def parse_targets(urls: str, token: str = "") -> tuple[ServerTarget, ...]:
    """The servers of a list that is separated by commas. Raises TargetError."""
    listed = [url for url in urls.split(",") if url.strip()] or [urls]
    targets = [ServerTarget.from_url(url, token) for url in listed]
    return tuple(dict.fromkeys(targets))


def order_targets(targets: Sequence[ServerTarget], job: str) -> tuple[ServerTarget, ...]:
    """The servers in the order in which the node agents of a job try them, by rendezvous hashing:
    the same order on all hosts, and another one for another job.

    https://en.wikipedia.org/wiki/Rendezvous_hashing
    """

    def compute_weight(target: ServerTarget) -> bytes:
        return hashlib.blake2b(f"{target.base_url} {job}".encode(), digest_size=8).digest()

    return tuple(sorted(targets, key=compute_weight, reverse=True))
