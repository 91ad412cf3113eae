"""Which world of ranks a process joins: that of its job, or one of its own inside a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hangwatch.model.ranks import Lifecycle

from ..environment.identity import LaunchInfo
from .ring_file import AncestorRank, find_ancestor_rank

_TCP_PREFIX, _FILE_PREFIX = "tcp://", "file://"


def get_master_address() -> str:
    """The ``address:port`` of the rendezvous in the environment; both parts may be empty."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def find_rendezvous(arguments: Mapping[str, Any]) -> str:
    """Where the ranks meet by the arguments of init_process_group: ``address:port``, a path, or the
    port of a store; empty if the environment says it, or nothing is known.

    The address of a store is left out, since its own rank may call it localhost.
    """
    method = arguments.get("init_method")
    if method is not None:
        for prefix in (_TCP_PREFIX, _FILE_PREFIX):
            if str(method).startswith(prefix):
                return str(method).removeprefix(prefix).partition("?")[0]
        return ""
    store = arguments.get("store")
    if isinstance(port := getattr(store, "port", None), int):
        return f"tcp:{port}"
    path = getattr(store, "path", None)
    return path if isinstance(path, str) else ""


def is_started_as_rank(launch: LaunchInfo) -> bool:
    """Whether the launcher made this process a rank by an environment of its own. Processes that a
    rank starts have the rank's environment, or that of a world of their own.
    """
    if launch.rank is None:
        return False
    ancestor = find_ancestor_rank()
    return ancestor is None or _is_same_world(
        ancestor, launch.rank, launch.world_size, get_master_address()
    )


def choose_launch(
    launch: LaunchInfo, rank: int, world_size: int, rendezvous: str
) -> LaunchInfo | None:
    """The job under which a process is recorded that joins a world; None if it is not recorded.

    Some launchers run in rank 0 and start the other ranks from there, which meet at the same
    address. A rank may also start the ranks of a world of its own, which is a job of its own.
    """
    ancestor = find_ancestor_rank()
    if ancestor is None or ancestor.lifecycle not in (
        Lifecycle.INITIALISING,
        Lifecycle.INITIALISED,
    ):
        return launch
    address = rendezvous or get_master_address()
    if _is_same_world(ancestor, rank, world_size, address):
        return replace(launch, job=ancestor.job)
    if world_size < 2:
        return None
    if launch.job != ancestor.job:
        return launch
    return replace(launch, job=f"{launch.job}/{address}")


def _is_same_world(ancestor: AncestorRank, rank: int, world_size: int, address: str) -> bool:
    return (
        ancestor.master_address == address
        and ancestor.world_size == world_size
        and ancestor.rank != rank
    )
