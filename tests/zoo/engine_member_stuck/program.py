"""Processes without a rank make a group by a store, as engines that serve do. One of them waits on an event; the others are in an all-reduce.

No call comes before the fault: the processes are no ranks.
"""

import multiprocessing
import os
import socket
import threading

import torch
import torch.distributed as dist


def load_weights():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def serve(number, size, port):
    store = dist.TCPStore("127.0.0.1", port, size, is_master=number == 0)
    store = dist.PrefixStore("engines", store)
    group = dist.ProcessGroup(store, number, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, number, size, dist.default_pg_timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    for step in range(50):
        if number == 1 and step == 20:
            load_weights()
        dist.all_reduce(torch.ones(2), group=group)


def main():
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    engines = [context.Process(target=serve, args=(number, 3, port)) for number in range(3)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()


if __name__ == "__main__":
    main()
