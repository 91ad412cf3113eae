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


@contextlib.contextmanager
def serve_report(report: str, *, has_json: bool = True, hangs: bool = False) -> Iterator[str]:
    """The address of a server with that report. ``hangs``: it never answers the query."""
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

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        stop.set()
        server.shutdown()
