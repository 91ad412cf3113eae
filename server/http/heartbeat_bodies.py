"""The bodies of requests that node agents send."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated

from ..core import limits
from ..core.problems import Problem
from ..ingest.heartbeat_checks import check_volume, count_objects, count_values
from .access import AgentGrant

_PART_BYTES = 1 << 20  # decompressed at a time
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
    """Raises Problem for anything but one gzip stream of bounded size, and as soon as what is
    decompressed has more values than a heartbeat may have: 63 KB can hold 64 MB of them.
    """
    stream = zlib.decompressobj(wbits=31)
    parts: list[bytes] = []
    size = objects = values = 0
    while not stream.eof:
        try:
            part = stream.decompress(stream.unconsumed_tail or body, _PART_BYTES)
        except zlib.error as error:
            raise Problem(422, f"the body is not gzip: {error}") from None
        if not (part or stream.eof):
            raise Problem(422, "the gzip body is cut short")
        body = b""
        parts.append(part)
        size += len(part)
        objects += count_objects(part)
        values += count_values(part)
        if size > limits.UNPACKED_BODY.most:
            raise limits.UNPACKED_BODY.make_problem(remedy=SIZE_REMEDY)
        check_volume(objects, values)
    return b"".join(parts)
