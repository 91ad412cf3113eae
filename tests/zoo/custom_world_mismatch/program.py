"""Two pairs of a trainer and an engine each have a world of their own, with one name: in the second pair the engine gathers what the trainer broadcasts."""

import os
import socket

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def join_world(port, number, size, name):
    """A second default world, as engines make one for the weights of a trainer."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=number == 0)
    store = dist.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, number, [], dist.Backend("gloo"), store, group_name=name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def share_ports(count):
    servers = [socket.socket() for _ in range(count)]
    for server in servers:
        server.bind(("127.0.0.1", 0))
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    dist.broadcast_object_list(ports, 0)
    return ports


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    ports = share_ports(2)
    pair = rank % 2  # trainer 0 with engine 2, trainer 1 with engine 3
    group = join_world(ports[pair], rank // 2, 2, "weight_update_group")
    own = dist.new_group([0, 1]), dist.new_group([2, 3])
    for _ in range(earlier_calls.count(0.2)):
        dist.broadcast(torch.ones(64), 0, group=group)
    for step in range(20):
        dist.all_reduce(torch.ones(8), group=own[rank // 2])
        weights = torch.ones(4)
        if step == 10:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        if step == 10 and rank == 3:
            dist.all_reduce(weights, group=group)  # PLANTED
        else:
            dist.broadcast(weights, 0, group=group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
