"""Decodes records into calls, with their signatures and call sites."""

from __future__ import annotations

from typing import Any

from hangwatch.model.calls import Call, Signature, Site

from .decoding import compute_age_s, parse_signature, parse_site
from .layout import RecordFlag
from .parts import Record, RingParts

# Plain integers, because the & operator of an enum is slow.
_BLOCKING = int(RecordFlag.BLOCKING)
_ASYNC = int(RecordFlag.ASYNC)
_RAISED = int(RecordFlag.RAISED)

_SIGNATURES_KEPT = 1024

# By (signature number, site number).
CallKinds = dict[tuple[int, int], tuple[Signature, "Site | None"]]


class CallDecoder:
    """Decodes the calls of one ring. Signatures are cached: their numbers are not reused."""

    __slots__ = ("_parts", "_signatures")

    def __init__(self, parts: RingParts) -> None:
        self._parts = parts
        self._signatures: dict[int, Signature] = {}

    def read_signature(self, number: int) -> Signature:
        """The signature with the number that a record refers to; operation "?" if it is lost."""
        signature = self._signatures.get(number)
        if signature is None:
            data = self._parts.read_interned(self._parts.signatures, number)
            signature = parse_signature(data)
            if data is not None:
                if len(self._signatures) >= _SIGNATURES_KEPT:
                    self._signatures.clear()
                self._signatures[number] = signature
        return signature

    def decode_record(self, record: Record, now_ns: int, kinds: CallKinds | None = None) -> Call:
        """The call of a record. ``kinds`` caches signatures and sites over several records."""
        _, entered_ns, done_ns, seq, chain, _, _, _, signature, site, thread, flags, _, _, _ = (
            record
        )
        kind = kinds.get((signature, site)) if kinds is not None else None
        if kind is None:
            kind = self._read_kind(signature, site)
            if kinds is not None:
                kinds[signature, site] = kind
        return Call(
            seq=seq,
            signature=kind[0],
            site=kind[1],
            chain=chain,
            entered_s=compute_age_s(now_ns, entered_ns),
            duration_s=max(0, done_ns - entered_ns) / 1e9 if done_ns else None,
            blocking=_decode_blocking(flags),
            thread=thread,
            raised=bool(flags & _RAISED),
        )

    def make_call(self, seq: int, signature: int, site: int, **fields: Any) -> Call:
        """A call, from the numbers of its signature and site and the remaining fields of `Call`."""
        decoded_signature, decoded_site = self._read_kind(signature, site)
        return Call(seq=seq, signature=decoded_signature, site=decoded_site, **fields)

    def _read_kind(self, signature: int, site: int) -> tuple[Signature, Site | None]:
        site_data = self._parts.read_interned(self._parts.sites, site) if site else None
        return self.read_signature(signature), parse_site(site_data)


def _decode_blocking(flags: int) -> bool | None:
    """Whether the calling thread waits; None if the recorder could not find out."""
    if flags & _BLOCKING:
        return True
    return False if flags & _ASYNC else None
