"""The performance of calls as text: sizes, bandwidths, durations and stragglers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .text import name_ranks, truncate_end


def format_size(size_bytes: int) -> str:
    """A size in binary units.

    >>> format_size(0), format_size(512), format_size(4096), format_size(25 << 20)
    ('0 B', '512 B', '4 KiB', '25 MiB')
    """
    unit = min(4, max(0, size_bytes.bit_length() - 1) // 10)
    amount = size_bytes / (1 << 10 * unit)
    return f"{amount:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def format_bandwidth(gbs: float) -> str:
    """A bandwidth in decimal units, like nccl-tests. ``gbs`` is in GB/s.

    >>> format_bandwidth(12.34), format_bandwidth(0.0256), format_bandwidth(0.000738)
    ('12.3 GB/s', '25.6 MB/s', '738 kB/s')
    """
    amount, unit = gbs * 1e6, "kB/s"
    if gbs >= 1:
        amount, unit = gbs, "GB/s"
    elif gbs >= 1e-3:
        amount, unit = gbs / 1e-3, "MB/s"
    three_digits = float(f"{amount:.3g}")
    return f"{three_digits:g} {unit}"


def format_duration(seconds: float) -> str:
    """A duration in s, ms or µs.

    >>> format_duration(0.0402), format_duration(2.5), format_duration(0.000031)
    ('40 ms', '2.5 s', '31 µs')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    amount, unit = seconds, "s"
    if seconds < 1:
        amount, unit = seconds / 1e-3, "ms"
    decimals = 0 if amount >= 10 else 1
    return f"{amount:.{decimals}f} {unit}"


def format_straggler(
    ranks: Iterable[int],
    group: str,
    *,
    share: float,
    lag_s: float,
    error_s: float,
    waited_share: float | None,
    because_of: Iterable[int] | None = None,
) -> str:
    """One sentence about stragglers. ``because_of`` are ranks for which they may have waited.

    ``waited_share`` is None if the calls are queued on a device: threads do not wait in them, and
    the sentence does not claim a waiting time.

    >>> text = format_straggler(
    ...     [3], "dp_1", share=0.92, lag_s=0.0402, error_s=0.0, waited_share=0.45
    ... )
    >>> print(text.replace(", which", ",\\nwhich"))
    rank 3 comes last in 92 % of the calls of dp_1, 40 ms after the others,
    which wait for it 45 % of the time
    """
    late_ranks = set(ranks)
    comes, pronoun = ("comes", "it") if len(late_ranks) == 1 else ("come", "them")
    lag = format_duration(lag_s)
    if error_s >= 0.05 * lag_s:
        lag += f" (± {format_duration(error_s)})"
    waited = "as their threads make them"
    if waited_share is not None:
        waited = f"which wait for {pronoun} {100 * waited_share:.0f} % of the time"
    sentence = (
        f"{truncate_end(name_ranks(late_ranks), 60)} {comes} last in {100 * share:.0f} % of"
        f" the calls of {group}, {lag} after the others, {waited}"
    )
    if because_of is not None:
        sentence += f"; {name_ranks(because_of)}, waited for in another group, may be the reason"
    return sentence
