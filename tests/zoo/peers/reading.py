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
    if (found := _ANALYZER_PATTERN.search(text)) is None:
        return ()
    if (errors := found["errors"]) is not None:
        return _parse_ranks(" ".join(re.findall(r"Culprit rank (\d+)", errors)))
    return _parse_ranks(found["missing"])


def parse_hangwatch(text: str) -> tuple[int, ...]:
    """The ranks that `hangwatch analyze --json` accuses, in all its incidents."""
    items = json.loads(text)["items"] if text.strip() else []
    return tuple(sorted({rank for item in items for rank in item["culprits"]}))


def parse_detail(text: str) -> tuple[int, ...]:
    """The ranks that TORCH_DISTRIBUTED_DEBUG=DETAIL names, by the kind of message that came first.

    Each rank prints its own view of a mismatch and accuses another: those accused most often are
    taken. That a rank waited in vain for the word of another counts only where nobody is accused
    otherwise.
    """
    found = list(_DETAIL_PATTERN.finditer(text))
    spoken = next((match.lastgroup for match in found if match["silent"] is None), None) or "silent"
    accused = Counter(
        rank for match in found if match.lastgroup == spoken for rank in _parse_ranks(match[spoken])
    )
    if spoken == "other":
        most = max(accused.values(), default=0)
        return tuple(sorted(rank for rank, times in accused.items() if times == most))
    return tuple(sorted(accused))


def parse_launcher(text: str) -> tuple[int, ...]:
    """The rank whose end torchrun, or torch.multiprocessing.spawn, says it saw first."""
    found = _LAUNCHER_PATTERN.search(text)
    return _parse_ranks(found[1] or found[2] or "") if found else ()


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(rank) for rank in re.findall(r"\d+", text)}))
