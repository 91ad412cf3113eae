"""Processes without a rank make a group by a store, as engines that serve do, and later a world of their own. One of them computes before some calls."""

import multiprocessing
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def make_group(number, size, port):
    store = dist.TCPStore("127.0.0.1", port, size, is_master=number == 0)
    store = dist.PrefixStore("engines", store)
    group = dist.ProcessGroup(store, number, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, number, size, dist.default_pg_timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def serve(number, size, ports):
    group = make_group(number, size, ports[0])
    for step in range(20):
        if number == 1 and step == 10:
            compute(5)
        dist.all_reduce(torch.ones(2), group=group)
    address = f"tcp://127.0.0.1:{ports[1]}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=size)
    earlier_calls.make()
    for step in range(20):
        if number == 1 and step == 10:
            compute(7)
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("spawn")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    engines = [context.Process(target=serve, args=(number, 3, ports)) for number in range(3)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()


if __name__ == "__main__":
    main()
