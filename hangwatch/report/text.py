"""Text for a terminal: styles, sites of code, ages, and the cleaning, truncation and wrapping
of untrusted text. Pure.
"""

from __future__ import annotations

import functools
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from hangwatch.model.ranks import format_ranks

Document = Mapping[str, Any]  # a JSON document of the API

TERMINAL_COLUMNS = 80
_INSTALL_PREFIX = re.compile(r"^.*(?:/(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")
# Whole control sequences and strings (ECMA-48, 5.4 and 5.6): if only their first byte were removed,
# their other characters would be shown.
_CONTROL_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f]).*?(?:\x1b\\|\x9c|\x07|$)",
    re.DOTALL,
)
_STYLES = re.compile(r"\x1b\[[\d;]*m")
_LINE_BREAKS = re.compile(r"[\t\n\r\v\f\x85\u2028\u2029]")


def _apply_style(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text else text


# The functions of style add ECMA-48 attributes, which have no width: apply them last. `strip_style`
# removes them where they are not to be shown.
as_bold = functools.partial(_apply_style, "1")
as_dim = functools.partial(_apply_style, "2")
as_error = functools.partial(_apply_style, "1;31")
as_warning = functools.partial(_apply_style, "33")
as_success = functools.partial(_apply_style, "32")


def by_severity(text: str, severity: object) -> str:
    return as_error(text) if severity == "alert" else as_warning(text)


def strip_style(text: str) -> str:
    """
    >>> strip_style(as_error("rank 3") + " waits")
    'rank 3 waits'
    """
    return _STYLES.sub("", text)


def clean_text(value: object) -> str:
    """`value` as text on one line, without control, formatting (such as direction overrides) and
    unassigned characters.
    """
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    spaced = _LINE_BREAKS.sub(" ", _CONTROL_SEQUENCES.sub("", text))
    return "".join(c for c in spaced if not unicodedata.category(c).startswith("C"))


def clean_member(document: Document, key: str, default: str = "?") -> str:
    """A member of a document as by `clean_text`; the default if it is null or missing."""
    value = document.get(key)
    return clean_text(default if value is None else value)


def get_parts(document: Document, key: str, limit: int | None = None) -> list[Any]:
    """The first parts of a document under a key; none if it lacks the key, or its value is null."""
    return (document.get(key) or [])[:limit]


def clean_document(value: Any) -> Any:
    """A JSON document with each text cleaned as by `clean_text`, except that line breaks stay."""
    if isinstance(value, str):
        return "\n".join(clean_text(line) for line in value.split("\n"))
    if isinstance(value, Mapping):
        return {clean_text(key): clean_document(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):  # there may be 100,000 ranks
        return [item if type(item) is int else clean_document(item) for item in value]
    return value


def truncate_end(text: str, width: int) -> str:
    """`text` cut at its end to `width` columns."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…"


def truncate_start(text: str, width: int) -> str:
    """`text` cut at its start to `width` columns, for paths, whose end is more specific."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :]


def format_age(seconds: float) -> str:
    """
    >>> format_age(0.42), format_age(75), format_age(4000), format_age(200_000)
    ('0.4 s', '75 s', '67 min', '56 h')
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 345_600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} d"


def parse_time(text: str) -> datetime:
    """An RFC 3339 time. Raises ValueError for other text."""
    # Before Python 3.11, fromisoformat does not know the letter Z.
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def seconds_since(stamp: object, now: datetime) -> float | None:
    """The time from `stamp`, an RFC 3339 time, to `now`; None if it is not such a time."""
    try:
        return (now - parse_time(str(stamp))).total_seconds()
    except (TypeError, ValueError):
        return None


def name_ranks(ranks: Iterable[int] | None) -> str:
    """``rank 1`` or ``ranks 0, 2-3``; None, as in documents without them, stands for no ranks."""
    listed = sorted(set(ranks or ()))
    noun = "rank" if len(listed) == 1 else "ranks"
    return f"{noun} {format_ranks(listed) if listed else 'none'}"


def abbreviate_list(items: Sequence[object], limit: int) -> str:
    """``a, b and 3 more``: the first ``limit`` items, and how many others there are."""
    text = ", ".join(map(clean_text, items[:limit]))
    if len(items) > limit:
        text += f" and {len(items) - limit} more"
    return text


def group_name(name: object, desc: object = None) -> str:
    """The name of a process group to show: its description if the script gave it one, which torch
    otherwise sets to ``undefined``.
    """
    return clean_text(name if desc in (None, "", "undefined") else desc)


def name_group(group: Document) -> str:
    """`group_name` of a group's document."""
    return group_name(group.get("name", "?"), group.get("desc"))


def resolve_root_rank(root: object, ranks: Sequence[int]) -> object:
    """The global rank of a root, which torch reports as an index in the group; unchanged if it is
    not a valid index.
    """
    if isinstance(root, int) and 0 <= root < len(ranks):
        return ranks[root]
    return root


def wrap_text(text: object, indent: str = "") -> list[str]:
    """The cleaned text in lines of at most `TERMINAL_COLUMNS`, broken between words. The first line
    starts with `indent`, the others with as many spaces.
    """
    return textwrap.wrap(
        clean_text(text or ""),
        TERMINAL_COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,
    )


def join_blocks(blocks: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of all blocks, with an empty line between any two that have lines."""
    for number, block in enumerate(filter(None, map(list, blocks))):
        if number:
            yield ""
        yield from block


def format_coarse_age(value: float | None) -> str:
    """An age such as ``now``, ``12 s``, ``3 min 20 s`` or ``2 h 5 min``.

    It is coarse, so that a page that shows it changes rarely. An unknown age is ``–``.
    """
    if value is None:
        return "–"
    whole = int(value)
    if whole < 60:
        return f"{whole} s" if whole >= 1 else "now"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_site(site: Document, with_function: bool = True) -> str:
    """``train.py:41 in step``, without the folders of an installed library."""
    location = _INSTALL_PREFIX.sub("", clean_member(site, "file"))
    if site.get("line"):
        location += f":{clean_member(site, 'line')}"
    if with_function and site.get("function"):
        location += f" in {clean_member(site, 'function')}"
    return location


def format_line(site: Document) -> str:
    """``train.py:41``, without any folder."""
    file = clean_member(site, "file").rsplit("/", 1)[-1]
    return f"{file}:{clean_member(site, 'line')}"
