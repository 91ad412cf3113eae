"""NCCL called without torch, as libraries for serving do, for the programs here: a communicator made by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist

_UNIQUE_ID_BYTES = 128
_FLOAT32, _SUM = 7, 0  # ncclFloat32, ncclSum


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class Communicator:
    """One that joins ``ranks``, by default the world; every member must make it. ``name`` tells several apart."""

    def __init__(self, name: str = "raw", ranks: Sequence[int] | None = None) -> None:
        members = list(range(dist.get_world_size()) if ranks is None else ranks)
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int
        ]  # fmt: skip
        store = dist.distributed_c10d._get_default_store()
        unique_id = _UniqueId()
        if dist.get_rank() == members[0]:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
            store.set(name, bytes(unique_id.data).hex())
        else:
            given = bytes.fromhex(store.get(name).decode())
            ctypes.memmove(ctypes.byref(unique_id), given, _UNIQUE_ID_BYTES)
        self._handle = ctypes.c_void_p()
        position = members.index(dist.get_rank())
        self._check(
            self._library.ncclCommInitRank(
                ctypes.byref(self._handle), len(members), unique_id, position
            )
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place, on the current stream."""
        data, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        self._check(
            self._library.ncclAllReduce(
                data, data, count, _FLOAT32, _SUM, self._handle, self._stream()
            )
        )

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """In place, on the current stream."""
        data, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        self._check(
            self._library.ncclBroadcast(
                data, data, count, _FLOAT32, root, self._handle, self._stream()
            )
        )

    def make_calls(self, count: int, size: int = 64) -> None:
        """Calls as fast as possible, between which the host now and then waits for the device."""
        data = torch.ones(size, device="cuda")
        for number in range(count):
            self.all_reduce(data)
            if number % 150 == 149:
                torch.cuda.synchronize()
        torch.cuda.synchronize()

    def destroy(self) -> None:
        self._check(self._library.ncclCommDestroy(self._handle))

    @staticmethod
    def _stream() -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"NCCL failed with error {error}")
