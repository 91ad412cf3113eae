"""Ranks 2 and 3 make a group by hand, as engines do. Rank 3 never comes to it: rank 2 waits in the creation, the others at the barrier."""

import os
import socket
import threading

import earlier_calls
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def make_group(port, number):
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0, wait_for_workers=False)
    store = dist.PrefixStore("weights", store)
    group, _ = c10d._new_process_group_helper(
        2, number, [], dist.Backend("gloo"), store, group_name="weights", timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def share_port(source):
    port = [None]
    if dist.get_rank() == source:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = [server.getsockname()[1]]
    dist.broadcast_object_list(port, source)
    return port[0]


def load_engine():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    port = share_port(2)
    if rank == 3:
        load_engine()
    if rank >= 2:
        make_group(port, rank - 2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
