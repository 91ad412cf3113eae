"""Ranks 2 and 3 make a group by hand, as engines do. Rank 3 computes before it comes to it; the others wait at the barrier."""

import socket
import time

import earlier_calls
import torch
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


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    port = share_port(2)
    if rank == 3:
        compute(9)
    if rank >= 2:
        dist.all_reduce(torch.ones(8), group=make_group(port, rank - 2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
