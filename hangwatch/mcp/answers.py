"""An answer as JSON of a limited size, from the parts that the other modules make of the API's
documents. Its keys are documented in docs/mcp.md, and only ever added to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .quoting import QUOTED_NOTE, Answer

MAX_ANSWER_BYTES = 8000

Document = Mapping[str, Any]


def encode_answer(answer: Answer) -> str:
    """The answer as JSON of at most `MAX_ANSWER_BYTES`: the longest lists lose their last items, and
    ``omitted`` counts these.
    """
    answer = {**answer, "note": QUOTED_NOTE}
    text = _dump_json(answer)
    omitted: dict[str, int] = {}
    while len(text.encode()) > MAX_ANSWER_BYTES:
        path, longest = _find_longest_list(answer)
        if longest is None:
            break
        dropped = max(1, len(longest) // 4)
        del longest[-dropped:]
        omitted[path] = omitted.get(path, 0) + dropped
        answer["omitted"] = omitted
        text = _dump_json(answer)
    return text


def _dump_json(answer: Answer) -> str:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


def _find_longest_list(value: Any, path: str = "") -> tuple[str, list[Any] | None]:
    """The list with more than one item that takes the most bytes, and its path in the answer."""
    best: tuple[int, str, list[Any] | None] = (0, "", None)
    pending: list[tuple[str, Any]] = [(path, value)]
    while pending:
        at, item = pending.pop()
        if isinstance(item, dict):
            pending += [(f"{at}.{key}" if at else key, part) for key, part in item.items()]
        elif isinstance(item, list):
            pending += [(at, part) for part in item]
            size = len(_dump_json({"": item}))
            if len(item) > 1 and size > best[0]:
                best = (size, at, item)
    return best[1], best[2]


def drop_empty(answer: Answer) -> Answer:
    return {key: value for key, value in answer.items() if value not in (None, "", [], {})}
