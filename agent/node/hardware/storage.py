"""Ranks that wait in the kernel for storage, and NFS requests without a reply.

The fields of /proc/self/mountstats are those of net/sunrpc/stats.c and nfs-utils' mountstats.
"""

from __future__ import annotations

from collections.abc import Iterator

from hangwatch.model.hardware import Observation, Weight

from .host import Host, list_names, read_text

SOURCE = "storage"

_SENDS, _RECEIVES = 6, 7  # of an "xprt: tcp" line's fields, after its two names
_MAX_THREADS = 1000


def probe(host: Host) -> tuple[Observation, ...]:
    observations = [o for pid in host.pids for o in _read_blocked_threads(host, pid)]
    observations += _read_mounts(read_text(host.proc / "self" / "mountstats") or "")
    return tuple(observations)


def _read_blocked_threads(host: Host, pid: int) -> Iterator[Observation]:
    """The threads of a rank in uninterruptible sleep, by the kernel function that they wait in."""
    counts: dict[str, int] = {}
    tasks = host.proc / str(pid) / "task"
    for tid in list_names(tasks)[:_MAX_THREADS]:
        state = (read_text(tasks / tid / "stat") or "").rpartition(")")[2].split()[:1]
        if state == ["D"]:
            channel = read_text(tasks / tid / "wchan") or "the kernel"
            counts[channel] = counts.get(channel, 0) + 1
    for channel, count in counts.items():
        yield Observation(
            source=SOURCE,
            about=f"process {pid}",
            what=f"uninterruptible in {'the kernel' if channel == '0' else channel}",
            now=count,
            weight=Weight.FAULT,
            is_abnormal=True,
        )


def _read_mounts(mountstats: str) -> Iterator[Observation]:
    mount = ""
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device ") and "fstype" in words:
            kind = words[words.index("fstype") + 1]
            is_nfs = kind.startswith("nfs") and "on" in words
            mount = words[words.index("on") + 1] if is_nfs else ""
        elif mount and words[:2] == ["xprt:", "tcp"] and len(words) > _RECEIVES + 2:
            sent, received = int(words[_SENDS + 2]), int(words[_RECEIVES + 2])
            yield Observation(
                source=SOURCE,
                about=mount,
                what="nfs_requests_without_reply",
                now=sent - received,
                is_abnormal=sent - received > 0,
            )
