"""A server that speaks the protocol of NCCL's RAS subsystem."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator

JSON_REPORT = """{
  "nccl_version": "2.28.9",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0xae94423cfbb2ef4a",
      "size": 4,
      "ranks_count": 3,
      "missing_ranks_count": 1,
      "ranks": [
        {"rank": 0, "host": "10.0.0.1", "pid": 100, "nvml_dev": 0,
         "status": {"init_state": 0, "async_error": 0},
         "collective_counts": {"AllReduce": 12, "AllGather": 3}},
        {"rank": 1, "host": "10.0.0.1", "pid": 101, "nvml_dev": 1,
         "status": {"init_state": 0, "async_error": 6},
         "collective_counts": {"AllReduce": 12, "AllGather": 3}},
        {"rank": 2, "host": "10.0.0.2", "pid": 100, "nvml_dev": 0,
         "status": {"init_state": 0, "async_error": 0},
         "collective_counts": {"AllReduce": 11, "AllGather": 3}}
      ],
      "missing_ranks": [
        {
          "rank": 3
          "host": "10.0.0.2",
          "pid": 101,
          "nvml_dev": 1,
          "status": {"unresponsive": true, "considered_dead": false}
        }
      ]
    }
  ]
}
"""
TEXT_REPORT = """NCCL version 2.26.2 compiled with CUDA 12.8

Job summary
===========

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""

# In the format of NCCL 2.32.3.
DIAGNOSTICS = """\
node0:100 NCCL DIAG === RAS Diagnostics ===
node0:100 NCCL DIAG [OK]   GPU inventory: 8x NVIDIA H100 per node consistent across 16 ranks in comm 0x1234
node0:100 NCCL DIAG [INFO] CUDA driver version: mismatch across 16 ranks in comm 0x1234, rank(s) {8,9} differ from rank 0 (13000)
node0:100 NCCL DIAG [INFO] ECC: uncorrected volatile errors on rank(s) {3} (worst=2) across 16 ranks in comm 0x1234
node0:100 NCCL DIAG [INFO] NVLink: inactive link(s) on rank(s) {0,1,2,3,4,5,6,7,...} (N=9) across 16 ranks in comm 0x1234
node0:100 NCCL DIAG [INFO] NVLink: inactive link(s) on rank(s) {0,1} across 2 ranks in comm 0x77
node0:100 NCCL DIAG [INFO] NCCL environment: mismatch across 16 ranks in comm 0x1234 for NCCL_ALGO
node0:100 NCCL DIAG [INFO] NCCL environment: NCCL_ALGO=Ring on rank(s) {0,1,2,3,4,5,6,7,...} (N=15)
node0:100 NCCL DIAG [INFO] NCCL environment: NCCL_ALGO=(unset) on rank(s) {15}
node0:100 NCCL DIAG [INFO] NCCL environment: 1 NCCL_* env var(s) differ across ranks in comm 0x1234
node0:100 NCCL DIAG [INFO] ECC: diagnostics incomplete, gathered 1/2 ranks in comm 0x78/0x1/0x2
node0:100 NCCL DIAG [INFO] IOMMU mode: enabled (DMA remapping) for 2 relevant device(s) across 16/16 ranks in comm 0x1234
node0:100 NCCL DIAG [INFO] Xid/SXid: no kernel-log source was available on host node2
node0:100 NCCL DIAG [INFO] Xid 79 detected 1 time on host node1.example.org. For the recommended response, see the documentation
node0:100 NCCL DIAG [INFO] Xid 31 detected at least 65535 times on host node1. Restart the affected application. For guidance, see
node0:100 NCCL DIAG [OK]   Xid 63 detected 1 time on host node1. No user action or further investigation is required for this Xid.
node0:100 NCCL DIAG [INFO] SXid 12028 detected 2 times (NVSwitch driver reported Fatal, link(s) {3,5}) on host node2. See the
node0:100 NCCL DIAG RAS diagnostics completed in 12.3 ms across 16 RAS peers
"""


@contextlib.contextmanager
def serve_report(
    report: str, *, has_json: bool = True, hangs: bool = False, diagnostics: str | None = None
) -> Iterator[str]:
    """The address of a server with that report. ``hangs``: it never answers the query. It knows the
    command ``diagnostics`` if there are any.
    """
    stop = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                command = line.decode().strip().lower()
                if command.startswith("client protocol"):
                    self.wfile.write(b"SERVER PROTOCOL 2\n")
                elif command == "set format json":
                    self.wfile.write(b"OK\n" if has_json else b"ERROR: Unknown command\n")
                elif command == "verbose status":
                    if hangs:
                        stop.wait(60)
                    self.wfile.write(report.encode())
                    return
                elif command.startswith("timeout "):
                    self.wfile.write(b"OK\n")
                elif command == "diagnostics" and diagnostics is not None:
                    self.wfile.write(diagnostics.encode())
                    return
                else:  # the connection stays open
                    self.wfile.write(f"ERROR: Unknown command {command}\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        stop.set()
        server.shutdown()
