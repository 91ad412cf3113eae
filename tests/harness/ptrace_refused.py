"""Runs a command under a seccomp filter that refuses access to other processes, as container
runtimes do, or all sockets but those of some families, as systemd does (RestrictAddressFamilies).

ptrace_refused.py [--families=AF_INET,AF_UNIX] COMMAND...
"""

import ctypes
import os
import socket
import struct
import sys

SOCKET, PTRACE, READV, PIDFD_GETFD = 41, 101, 310, 438  # x86_64
EPERM, EAFNOSUPPORT = 1, 97
LOAD, JUMP_EQUAL, GIVE = 0x20, 0x15, 0x06
ALLOWED, ERRNO = 0x7FFF0000, 0x00050000
FIRST_ARGUMENT = 16  # in struct seccomp_data
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def encode_instruction(code: int, jt: int, jf: int, k: int) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def build_filter() -> bytes:
    refused = (PTRACE, READV)
    checks = b"".join(
        encode_instruction(JUMP_EQUAL, len(refused) - i, 0, number)
        for i, number in enumerate(refused)
    )
    return (
        encode_instruction(LOAD, 0, 0, 0)
        + checks
        + encode_instruction(GIVE, 0, 0, ALLOWED)
        + encode_instruction(GIVE, 0, 0, ERRNO | EPERM)
    )


def build_family_filter(families: list[int]) -> bytes:
    checks = b"".join(
        encode_instruction(JUMP_EQUAL, len(families) - i, 0, family)
        for i, family in enumerate(families)
    )
    return (
        encode_instruction(LOAD, 0, 0, 0)
        + encode_instruction(JUMP_EQUAL, 0, len(families) + 2, SOCKET)
        + encode_instruction(LOAD, 0, 0, FIRST_ARGUMENT)
        + checks
        + encode_instruction(GIVE, 0, 0, ERRNO | EAFNOSUPPORT)
        + encode_instruction(GIVE, 0, 0, ALLOWED)
    )


def main() -> None:
    code = build_filter()
    option, _, names = sys.argv[1].partition("=")
    if option == "--families":
        code = build_family_filter([getattr(socket, name) for name in names.split(",")])
        del sys.argv[1]
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


main()
