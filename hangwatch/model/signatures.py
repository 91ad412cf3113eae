"""Hashes of signatures, equal in every process, and their JSON encoding."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from .calls import Signature
from .operator_spec import MustMatch

UINT64_MASK = (1 << 64) - 1
UNKNOWN_OP = "?"  # of a call whose signature is lost
CHAIN_BASE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: odd, with evenly distributed bits
_CHAIN_BASE_INVERSE = pow(CHAIN_BASE, -1, 1 << 64)


def with_agreement_hash(
    signature: Signature, must_match: MustMatch, numels: tuple[int, ...]
) -> Signature:
    """``signature`` with its hash set; ``numels`` are the element counts of its tensors.

    Element counts are compared instead of shapes: backends transfer elements, and a rank may
    legally pass a view of another shape.
    """
    parts = [signature.op]
    if must_match & MustMatch.DTYPE:
        parts.append(f"dtype={signature.dtype}")
    if must_match & MustMatch.SHAPE:
        parts.append(f"numels={numels}")
    if must_match & MustMatch.REDUCE_OP:
        parts.append(f"reduce={signature.reduce_op}")
    if must_match & MustMatch.ROOT:
        parts.append(f"root={signature.root}")
    if signature.detail is not None:
        parts.append(signature.detail)
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
    return replace(signature, agree=int.from_bytes(digest, "little") or 1)


def extend_chain(previous: int, agreement_hash: int) -> int:
    """The running hash of a stream after a call, from its previous value and the call's hash.

    A polynomial in an odd base modulo 2**64 (Karp and Rabin, 1987): a single differing call always
    changes the result.
    """
    return (previous * CHAIN_BASE + agreement_hash) & UINT64_MASK


def unchain(after: int, agreement_hash: int) -> int:
    """The running hash before a call, from the one after it.

    >>> unchain(chain(5, 7), 7)
    5
    """
    return (after - agreement_hash) * _CHAIN_BASE_INVERSE & UINT64_MASK


def encode_signature(signature: Signature) -> dict[str, Any]:
    """The JSON data in a ring and in a heartbeat; fields equal to their default are omitted."""
    data: dict[str, Any] = {"op": signature.op, "agree": signature.agree}
    if signature.shapes:
        data["shapes"] = [list(shape) for shape in signature.shapes]
    for name in ("dtype", "reduce_op", "root", "detail"):
        if (value := getattr(signature, name)) is not None:
            data[name] = value
    if signature.numel:
        data["numel"] = signature.numel
    if signature.splits is not None:
        data["splits"] = [list(signature.splits[0]), list(signature.splits[1])]
    return data


def decode_signature(data: dict[str, Any]) -> Signature:
    """The inverse of `encode_signature`. Raises KeyError, TypeError, ValueError or IndexError for
    malformed data.
    """
    splits = data.get("splits")
    return Signature(
        op=str(data["op"]),
        shapes=tuple(tuple(int(n) for n in shape) for shape in data.get("shapes", ())),
        dtype=_optional_text(data.get("dtype")),
        reduce_op=_optional_text(data.get("reduce_op")),
        root=None if data.get("root") is None else int(data["root"]),
        splits=None if splits is None else (tuple(map(int, splits[0])), tuple(map(int, splits[1]))),
        detail=_optional_text(data.get("detail")),
        numel=int(data.get("numel", 0)),
        agree=int(data.get("agree", 0)),
    )


def _optional_text(value: object) -> str | None:
    return None if value is None else str(value)
