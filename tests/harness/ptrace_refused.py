"""Runs a command under a seccomp filter that refuses access to other processes, as container
runtimes do.

ptrace_refused.py COMMAND...
"""

import ctypes
import os
import struct
import sys

PTRACE, READV, PIDFD_GETFD = 101, 310, 438  # x86_64
EPERM = 1
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def build_filter() -> bytes:
    def encode_instruction(code: int, jt: int, jf: int, k: int) -> bytes:
        return struct.pack("<HBBI", code, jt, jf, k)

    refused = (PTRACE, READV)
    load, jump_equal, give = 0x20, 0x15, 0x06
    checks = b"".join(
        encode_instruction(jump_equal, len(refused) - i, 0, number)
        for i, number in enumerate(refused)
    )
    return (
        encode_instruction(load, 0, 0, 0)
        + checks
        + encode_instruction(give, 0, 0, 0x7FFF0000)
        + encode_instruction(give, 0, 0, 0x00050000 | EPERM)
    )


def main() -> None:
    code = build_filter()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


main()
