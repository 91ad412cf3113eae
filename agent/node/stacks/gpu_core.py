"""Core dumps of the GPUs of a process that is to be ended: how to have the driver write one, and the
kernels in it.

The driver of a process with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 creates a FIFO with its CUDA context,
and writes the file once it reads a byte from there; then it aborts the process. The file is an ELF file
whose sections hold tables: their types and rows are those of NVIDIA's cudacoredump.h. Rows grow from one
driver to the next, so that the size of a row is its section's, and only its beginning is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hangwatch.model.kernels import MAX_KERNEL_NAME_CHARS, MAX_KERNELS, Kernel, Kernels

from ...environment import run_dir
from .cuda_gdb import strip_arguments

# The largest file that was measured, of a kernel on the whole GPU, had 108 MB and 422,689 sections.
REQUIRED_BYTES = 256 << 20
_MAX_SECTIONS = 2_000_000
_MAX_READ_BYTES = 1 << 30
_MAX_TABLE_BYTES = 64 << 20  # rows, symbols or names of one section
_MAX_GRIDS = 1024
_MAX_FUNCTIONS = 1_000_000  # after these no further image is read
_MAX_NAME_BYTES = 4096

_FILE_HEADER = struct.Struct("<4sB59x")
_SECTION_TABLE = struct.Struct(
    "<40xQ10xHHH"
)  # its offset, the size and number of its entries, names
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_GRID = struct.Struct("<Q16xQ24x16x6I8x")  # its number, the kernel's address, and the dimensions
_BLOCK = struct.Struct("<Q")  # the number of the grid that it belongs to
_ELF_64_BIT = 2
_SYMBOLS, _STRINGS, _FUNCTION = 2, 3, 2  # elf(5): SHT_SYMTAB, SHT_STRTAB, STT_FUNC
_FIRST_CUDA_TYPE = 0x80000000
_IMAGES, _GRIDS, _BLOCKS = _FIRST_CUDA_TYPE + 7, _FIRST_CUDA_TYPE + 12, _FIRST_CUDA_TYPE + 13
_ROW_SIZES = {_GRIDS: (112, 128, 144), _BLOCKS: (24, 40, 56)}  # where the sections do not say it
_MANGLED_PART = re.compile(r"L?(\d{1,4})")
_UNKNOWN = "unknown kernel"


class GpuCoreError(Exception):
    """There is no core dump, or it cannot be read. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCore:
    """The core dump of the process ``pid`` in the run dir ``folder``, where the recorder lets its driver
    write one.
    """

    folder: Path
    pid: int

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.pid}{run_dir.GPU_CORE_SUFFIX}"

    @property
    def _pipe(self) -> Path:
        return self.folder / f"{self.pid}{run_dir.GPU_PIPE_SUFFIX}"

    def request_core(self, required_bytes: int = REQUIRED_BYTES) -> bool:
        """Has the driver write the file and abort the process. Returns False if the job does not want that,
        and raises GpuCoreError if it cannot be done.
        """
        if not self._pipe.exists():
            return False
        try:
            space = os.statvfs(self.folder)
            if space.f_bavail * space.f_frsize < required_bytes:
                raise GpuCoreError(
                    f"{self.folder} has less than {required_bytes >> 20} MB free: set HANGWATCH_RUN_DIR"
                    " to a folder with more"
                )
            self._path.unlink(missing_ok=True)
            self._limit_host_core()
            fd = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                    raise GpuCoreError(f"{self._pipe} is not the driver's pipe")
                os.write(fd, b"\n")
            finally:
                os.close(fd)
        except OSError as error:  # the driver does not read the pipe any more
            raise GpuCoreError(f"no core dump of the GPU can be requested: {error}") from error
        return True

    def _limit_host_core(self) -> None:
        """Keeps the kernel from writing all of the process's memory to a file when the driver aborts it. A
        limit of one byte also applies where core dumps are sent to a program (core(5)).
        """
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_CORE)
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (1 if hard else 0, hard))

    def take_kernels(self) -> Kernels:
        """The kernels that were on the devices. Removes the file, which is large. Raises GpuCoreError."""
        try:
            return read_kernels(self._path)
        finally:
            with contextlib.suppress(OSError):  # there is none, or the folder is gone
                self._path.unlink()


class _Section(NamedTuple):
    """The header of a section, as in elf(5)."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def read_kernels(path: Path) -> Kernels:
    """The kernels in a core dump of the GPU. Raises GpuCoreError for any other file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise GpuCoreError(f"{path} is not a file")
            return _CoreFile(file, status.st_size).list_kernels()
    except FileNotFoundError:
        raise GpuCoreError("the driver wrote no core dump") from None
    except (OSError, struct.error, ValueError, OverflowError) as error:
        raise GpuCoreError(f"the core dump of the GPU cannot be read: {error}") from error


class _CoreFile:
    """Nothing in the file is trusted: every part is read within bounds. Its methods raise GpuCoreError,
    OSError, OverflowError, ValueError or struct.error.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._unread_bytes = _MAX_READ_BYTES  # tables may overlap

    def list_kernels(self) -> Kernels:
        """The kernels that have blocks on a device or, if the file has no table of blocks, all."""
        tables = defaultdict(list)
        for section in self._iter_sections(0, self._size, (_IMAGES, _GRIDS, _BLOCKS)):
            tables[section.type].append(section)
        grids = {}  # by number: the kernel's address, and the kernel without its name
        for section in tables[_GRIDS]:
            for number, entry, *dimensions in islice(self._iter_rows(section, _GRID), _MAX_GRIDS):
                x, y, z, block_x, block_y, block_z = dimensions
                grid, block = (x, y, z), (block_x, block_y, block_z)
                kernel = Kernel(name=_UNKNOWN, device=section.info, grid=grid, block=block)
                grids[number] = entry, kernel
            if len(grids) >= _MAX_GRIDS:
                break
        if tables[_BLOCKS]:
            resident: set[int] = set()
            for section in tables[_BLOCKS]:
                resident.update(n for (n,) in self._iter_rows(section, _BLOCK) if n in grids)
            grids = {number: grids[number] for number in sorted(resident)}
        running = list(grids.values())[:MAX_KERNELS]
        names = self._find_names(tables[_IMAGES], {entry for entry, _ in running})
        return tuple(replace(kernel, name=names.get(entry, _UNKNOWN)) for entry, kernel in running)

    def _find_names(self, images: Sequence[_Section], addresses: Collection[int]) -> dict[int, str]:
        """The names of the functions at these addresses, as far as images show them."""
        names = {}
        count = 0
        for image in images:
            # An image of a form that is not known leaves its kernels without a name.
            with contextlib.suppress(GpuCoreError, ValueError, struct.error):
                for first, end, name in self._iter_functions(image):
                    count += 1
                    for address in addresses:
                        if first <= address < end:
                            names[address] = demangle_name(name)[:MAX_KERNEL_NAME_CHARS]
            if count > _MAX_FUNCTIONS:
                break
        return names

    def _read(self, offset: int, size: int) -> bytes:
        self._unread_bytes -= size
        is_inside = offset + size <= self._size
        if size > _MAX_TABLE_BYTES or not is_inside or self._unread_bytes < 0:
            raise GpuCoreError("the core dump of the GPU is cut off, or no such file")
        self._file.seek(offset)
        return self._file.read(size)

    def _iter_sections(
        self, base: int, size: int, types: Collection[int] = ()
    ) -> Iterator[_Section]:
        """The headers of the sections of an ELF file in the file, from ``base`` on; all, or of these types."""
        header = self._read(base, min(size, _FILE_HEADER.size))
        mark, file_class = _FILE_HEADER.unpack(header)
        table, entry_size, count, _ = _SECTION_TABLE.unpack(header)
        if mark != b"\x7fELF" or file_class != _ELF_64_BIT or entry_size != _SECTION.size:
            raise GpuCoreError("not a core dump of the GPU: no 64-bit ELF file")
        if not count:  # the first one has the number if it does not fit
            count = _Section(*_SECTION.unpack(self._read(base + table, _SECTION.size))).size
        if count > _MAX_SECTIONS or table + count * _SECTION.size > size:
            raise GpuCoreError("the core dump of the GPU is cut off, or no such file")
        step = _MAX_TABLE_BYTES // _SECTION.size
        for first in range(0, count, step):
            part_size = min(step, count - first) * _SECTION.size
            part = self._read(base + table + first * _SECTION.size, part_size)
            for fields in _SECTION.iter_unpack(part):
                if not types or fields[1] in types:
                    yield _Section(*fields)

    def _iter_rows(self, section: _Section, row: struct.Struct) -> Iterator[tuple[int, ...]]:
        """The rows of a table, each as far as ``row`` describes it."""
        size = section.entry_size
        if not size:
            known_sizes = _ROW_SIZES.get(section.type, ())
            size = next((known for known in known_sizes if section.size % known == 0), 0)
        if size < row.size:
            return
        data = self._read(section.offset, section.size)
        for at in range(0, len(data) - size + 1, size):
            yield row.unpack_from(data, at)

    def _iter_functions(self, image: _Section) -> Iterator[tuple[int, int, str]]:
        """The first address, the end and the symbol of each function in code that was loaded onto a device."""
        sections = list(self._iter_sections(image.offset, image.size))
        for table in sections:
            if table.type != _SYMBOLS or table.link >= len(sections):
                continue
            strings = sections[table.link]
            if max(table.offset + table.size, strings.offset + strings.size) > image.size:
                continue
            names = self._read(image.offset + strings.offset, strings.size)
            symbols = self._read(image.offset + table.offset, table.size)
            whole = len(symbols) - len(symbols) % _SYMBOL.size
            for name_at, kind, _, index, address, size in _SYMBOL.iter_unpack(symbols[:whole]):
                if kind & 15 != _FUNCTION or not size or not address:
                    continue  # it is no function, or not loaded yet
                # Addresses are those on the device, or count from the beginning of the section.
                first = sections[index].address if 0 < index < len(sections) else 0
                if address >= first:
                    first = 0
                name = names[name_at : name_at + _MAX_NAME_BYTES].partition(b"\0")[0]
                start = first + address
                yield start, start + size, name.decode(errors="replace")


def demangle_name(symbol: str) -> str:
    """The qualified name in a symbol of C++, without the arguments of templates and of the function.

    Only the simple beginning of the Itanium ABI's encoding is decoded: ``_Z`` and lengths with names, between
    ``N`` and ``E`` if there are several. Other symbols are kept.

    >>> demangle_name("_ZN2at6native12_GLOBAL__N_14fillIfEEvPT_")
    'at::native::(anonymous namespace)::fill'
    """
    if not symbol.startswith("_Z"):
        return strip_arguments(symbol) or symbol
    position = 2
    is_nested = symbol.startswith("N", position)
    position += is_nested
    parts: list[str] = []
    while match := _MANGLED_PART.match(symbol, position):
        first = match.end()
        position = first + int(match[1])
        part = symbol[first:position]
        parts.append("(anonymous namespace)" if part.startswith("_GLOBAL__N_") else part)
        if not is_nested:
            break
    return "::".join(parts) or symbol
