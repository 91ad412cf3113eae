"""The bodies of heartbeats."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from hangwatch.server.core import limits
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import heartbeats


def test_gzip_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeats.decompress_body(gzip.compress(b"{}")) == b"{}"
    monkeypatch.setattr(limits, "UNPACKED_BODY", replace(limits.UNPACKED_BODY, maximum=1000))
    for body, status in (
        (gzip.compress(b"0" * 2000), 413),
        (b"no gzip", 422),
        (gzip.compress(b"{}")[:-4], 422),
    ):
        with pytest.raises(Problem) as raised:
            heartbeats.decompress_body(body)
        assert raised.value.status == status
