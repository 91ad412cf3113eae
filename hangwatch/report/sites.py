"""Sites of code as terminal text, and the type of the API's documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .text import clean_text

Document = Mapping[str, Any]

_INSTALL_PREFIX = re.compile(r"^.*(?:/(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")


def format_site(site: Document, with_function: bool = True) -> str:
    """``train.py:41 in step``, without the folders of an installed library."""
    line = site.get("line")
    location = _INSTALL_PREFIX.sub("", clean_text(site.get("file", "?")))
    if line:
        location += f":{clean_text(line)}"
    if with_function and site.get("function"):
        return f"{location} in {clean_text(site['function'])}"
    return location


def format_line(site: Document) -> str:
    """``train.py:41``, without any folder."""
    file = clean_text(site.get("file", "?")).rsplit("/", 1)[-1]
    return f"{file}:{clean_text(site.get('line', '?'))}"
