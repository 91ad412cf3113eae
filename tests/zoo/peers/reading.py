"""Which ranks the tools accuse, as read from what they print."""

from __future__ import annotations

import json
import re
from collections import Counter

_ANALYZER_PATTERN = re.compile(
    r"(?:missing ranks:|Missing dump files from ranks) \{(?P<missing>[\d, ]+)\}|error msg:"
    r" (?P<errors>.*)"
)
_DETAIL_PATTERN = re.compile(
    r"Ranks (?P<late>[\d, ]+) failed to pass monitoredBarrier"
    r"|Detected mismatch between collectives on ranks\. .*?but Rank (?P<other>\d+) is running"
    r"|errors while waiting for send/recv from rank (?P<silent>\d+)"
)
_LAUNCHER_PATTERN = re.compile(
    r"Root Cause \(first observed failure\):.*?\brank +: (\d+)|[Pp]rocess (\d+) terminated with",
    re.S,
)


def parse_analyzer(text: str) -> tuple[int, ...]:
    """The ranks of the first finding of PyTorch's Flight Recorder analyzer: later ones often follow
    from it.
    """
    if (match := _ANALYZER_PATTERN.search(text)) is None:
        return ()
    if (errors := match["errors"]) is not None:
        return _parse_ranks(" ".join(re.findall(r"Culprit rank (\d+)", errors)))
    return _parse_ranks(match["missing"])


def parse_hangwatch(text: str) -> tuple[int, ...]:
    """The ranks that `hangwatch analyze --json` accuses, in all its incidents."""
    items = json.loads(text)["items"] if text.strip() else []
    return tuple(sorted({rank for item in items for rank in item["culprits"]}))


def parse_detail(text: str) -> tuple[int, ...]:
    """The ranks that TORCH_DISTRIBUTED_DEBUG=DETAIL names, by the kind of message that came first.

    Each rank prints its own view of a mismatch and accuses another: those accused most often are
    taken. A rank from which another did not receive a message counts only if no other rank is
    accused.
    """
    matches = list(_DETAIL_PATTERN.finditer(text))
    message_kind = (
        next((match.lastgroup for match in matches if match["silent"] is None), None) or "silent"
    )
    accused = Counter(
        rank
        for match in matches
        if match.lastgroup == message_kind
        for rank in _parse_ranks(match[message_kind])
    )
    if message_kind == "other":
        max_count = max(accused.values(), default=0)
        return tuple(sorted(rank for rank, count in accused.items() if count == max_count))
    return tuple(sorted(accused))


def parse_launcher(text: str) -> tuple[int, ...]:
    """The rank that ended first according to torchrun or torch.multiprocessing.spawn."""
    match = _LAUNCHER_PATTERN.search(text)
    return _parse_ranks(match[1] or match[2] or "") if match else ()


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(rank) for rank in re.findall(r"\d+", text)}))
