"""The bodies of requests that node agents send."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated

from ..core import limits
from ..core.problems import Problem
from .access import AgentGrant

SIZE_REMEDY = "send the heartbeat in parts"


def check_content_coding(headers: Mapping[str, str]) -> bool:
    """Whether the body is compressed. Raises Problem if it is compressed in another way than gzip."""
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise Problem(
            415,
            f"content encoding {coding} is not supported; send the body plain or as gzip",
            headers={"Accept-Encoding": "gzip"},
        )
    return coding == "gzip"


def decode_body(headers: Mapping[str, str], body: bytes, grant: AgentGrant) -> bytes:
    """The decompressed body. Raises Problem if it is too large or does not match its headers."""
    is_compressed = check_content_coding(headers)
    grant.check_body(body)
    return decompress_body(body) if is_compressed else body


def decompress_body(body: Annotated[bytes, "gzip"]) -> bytes:
    """Raises Problem for anything but one gzip stream of bounded size."""
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(body, limits.UNPACKED_BODY.most)
    except zlib.error as error:
        raise Problem(422, f"the body is not gzip: {error}") from None
    if stream.unconsumed_tail:
        raise limits.UNPACKED_BODY.make_problem(remedy=SIZE_REMEDY)
    if not stream.eof:
        raise Problem(422, "the gzip body is cut short")
    return plain
