"""The calls of an incident as terminal text: a column for each class of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .sites import Document, format_line, format_site
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    group_name,
    name_ranks,
    resolve_root_rank,
    truncate_end,
    truncate_start,
)

_MAX_COLUMNS = 3  # classes shown side by side
_LABEL_WIDTH = 11


def format_calls(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """What the ranks called, with a column for each class of equal calls; rows in which the classes
    differ are marked with ``≠``.
    """
    classes = document.get("calls") or []
    if not classes:
        return
    group = document.get("group") or {}
    where = f" of group {group_name(group.get('name'), group.get('desc'))}" if group else ""
    # The calls of a channel between two ranks are not counted by group.
    is_point_to_point = any(c.get("peer") is not None for c in classes)
    has_position = document.get("seq") is not None and not is_point_to_point
    yield paint.bold(f"Call {document['seq']}{where}" if has_position else f"Calls{where}")
    members = group.get("ranks") or []
    # As in the summary, roots are ranks of the job.
    classes = [{**c, "root": resolve_root_rank(c.get("root"), members)} for c in classes]
    differing = set(document.get("fields") or [])
    for start in range(0, len(classes), _MAX_COLUMNS):
        if start:
            yield ""
        yield from _format_call_table(classes[start : start + _MAX_COLUMNS], differing, paint)


_CALL_ROWS = {
    "op": "op",
    "shape": "shapes",
    "dtype": "dtype",
    "reduce_op": "reduce_op",
    "root": "root",
    "peer": "peer",
    "splits": "splits",
    "detail": "detail",
}


def _format_call_table(
    classes: Sequence[Document], differing_fields: set[str], paint: Paint
) -> Iterator[str]:
    width = (TERMINAL_COLUMNS - 2 - _LABEL_WIDTH) // len(classes) - 2
    titles = [_pad_text(name_ranks(c.get("ranks") or []), width) for c in classes]
    yield _format_row("", "", [paint.bold(title) for title in titles])
    for name, key in _CALL_ROWS.items():
        values = [_format_value(c.get(key)) for c in classes]
        if not any(values):
            continue
        cells = [_pad_text(value or "-", width) for value in values]
        if name in differing_fields:
            yield _format_row("≠", name, [paint.as_error(cell) for cell in cells])
        else:
            yield _format_row("", name, cells)
    if not any(c.get("site") for c in classes):
        return
    sites = [c.get("site") or {} for c in classes]
    locations = [format_site(site, with_function=False) if site else "-" for site in sites]
    functions = [clean_text(site.get("function", "-")) for site in sites]
    yield _format_row("", "at", [_pad_text(truncate_start(x, width), width) for x in locations])
    yield _format_row("", "in", [_pad_text(function, width) for function in functions])


def format_divergence(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The last calls of both sides, aligned; those that only one side made are marked with ``≠``."""
    divergence = document.get("divergence")
    if not divergence:
        return
    group = divergence.get("group") or {}
    yield paint.bold(f"Calls of group {group_name(group.get('name'), group.get('desc'))}, aligned")
    width = (TERMINAL_COLUMNS - 2) // 2 - 1
    sides = [name_ranks(side.get("ranks") or []) for side in divergence.get("sides") or []]
    titles = [paint.bold(_pad_text(side, width)) for side in sides]
    yield f"  {'  '.join(titles)}".rstrip()
    for row in divergence.get("rows") or []:
        if row.get("omitted"):
            yield paint.dim(f"  … {clean_text(row['omitted'])} more that agree")
        yield _format_aligned_row(row, width, paint)


def _format_aligned_row(row: Document, width: int, paint: Paint) -> str:
    cells = []
    differs = False
    for seq, call in zip(row.get("seq") or [], row.get("calls") or [], strict=False):
        differs |= call is None or bool(call.get("raised"))
        text = "-" if call is None else f"{clean_text(seq)} {format_aligned_call(call)}"
        cells.append(_pad_text(text, width))
    if differs:
        cells = [paint.as_error(cell) for cell in cells]
    return f"{'≠' if differs else ' '} {'  '.join(cells)}".rstrip()


def format_aligned_call(call: Document) -> str:
    """``all_reduce train.py:41 [64]``."""
    site = call.get("site")
    at = format_line(site) if site else ""
    parts = (
        clean_text(call.get("op", "?")),
        "raised" if call.get("raised") else "",
        at,
        _format_value(call.get("shapes")),
    )
    return " ".join(part for part in parts if part)


def _format_row(mark: str, name: str, cells: Sequence[str]) -> str:
    return f"{mark:2}{name:{_LABEL_WIDTH}}{'  '.join(cells)}".rstrip()


def _pad_text(text: str, width: int) -> str:
    return f"{truncate_end(text, width):{width}}"


def _format_value(value: object) -> str:
    """A value of a call; lists, such as shapes, one after another."""
    if value is None:
        return ""
    if not isinstance(value, (list, tuple)):
        return clean_text(value)
    return " ".join(map(_format_part, value))


def _format_part(part: object) -> str:
    if isinstance(part, (list, tuple)):
        return f"[{', '.join(map(clean_text, part))}]"
    return clean_text(part)
