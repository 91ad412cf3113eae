"""Writes core dumps of GPUs with the sections that hangwatch reads, in the layout that the driver has."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_FIRST_CUDA_TYPE = 0x80000000
_IMAGE, _DEVICES, _SMS, _GRIDS, _BLOCKS = (_FIRST_CUDA_TYPE + n for n in (7, 9, 11, 12, 13))
_ROW_BYTES = 144  # of a grid, as of driver 580


class FakeKernel(NamedTuple):
    symbol: str
    address: int
    grid: tuple[int, int, int] = (2, 1, 1)
    block: tuple[int, int, int] = (128, 1, 1)
    resident_blocks: int = 2


class _FakeSection(NamedTuple):
    type: int
    content: bytes
    address: int = 0
    link: int = 0
    info: int = 0
    entry_size: int = 0


def make_core(
    kernels: Sequence[FakeKernel], *, device: int = 0, says_row_size: bool = True
) -> bytes:
    """A file with these kernels on one device."""
    grids = blocks = b""
    for number, kernel in enumerate(kernels, start=1):
        row = struct.pack(
            "<7Q12I",
            *(number, 7, 9, kernel.address, 11, 0, 0, 1, 1, 2, 32),
            *(*kernel.grid, *kernel.block, 0, 4242),
        )
        grids += row.ljust(_ROW_BYTES, b"\0")
        for index in range(kernel.resident_blocks):
            blocks += struct.pack("<Q4I", number, index, 0, 0, 0)
    sections = [
        _FakeSection(0, b""),
        _FakeSection(_DEVICES, struct.pack("<3Q14I", *[1] * 17)),
        _FakeSection(
            _GRIDS, grids, link=1, info=device, entry_size=_ROW_BYTES if says_row_size else 0
        ),
        _FakeSection(_IMAGE, make_image(kernels)),
        _FakeSection(_SMS, bytes(8), link=1, entry_size=8),
        _FakeSection(_BLOCKS, blocks, link=4, entry_size=24 if says_row_size else 0),
        _FakeSection(3, b"\0NVIDIA\0"),
    ]
    return _make_file(sections)


def make_image(kernels: Sequence[FakeKernel]) -> bytes:
    """The code of the kernels, 4096 bytes each, as it was loaded onto a device."""
    names, symbols = b"\0", bytes(24)
    for kernel in kernels:
        symbols += struct.pack("<IBBHQQ", len(names), 0x12, 0, 1, kernel.address, 4096)
        names += kernel.symbol.encode() + b"\0"
    first = kernels[0].address if kernels else 0
    return _make_file(
        [
            _FakeSection(0, b""),
            _FakeSection(1, b"", address=first),
            _FakeSection(2, symbols, link=3, info=1, entry_size=24),
            _FakeSection(3, names),
        ]
    )


def _make_file(sections: Sequence[_FakeSection]) -> bytes:
    data, headers = b"", b""
    for section in sections:
        headers += struct.pack(
            "<IIQQQQIIQQ",
            *(0, section.type, 0, section.address, 64 + len(data), len(section.content)),
            *(section.link, section.info, 8, section.entry_size),
        )
        data += section.content + bytes(-len(section.content) % 8)
    header = b"\x7fELF" + bytes([2, 1, 1, 0x33]) + bytes(8)
    header += struct.pack("<HHIQQQI", 4, 190, 1, 0, 0, 64 + len(data), 0)
    header += struct.pack("<HHHHHH", 64, 0, 0, 64, len(sections), len(sections) - 1)
    return header + data + headers
