"""Two pairs of processes without a rank make a group each, of one name in stores of their own. The second member of one pair reads a file that nobody writes; the other pair serves on.

No call comes before the fault: the processes are no ranks.
"""

import multiprocessing
import os
import socket
import time

import torch
import torch.distributed as dist


def read_request():
    os.mkfifo("requests")
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open("requests") as pipe:  # PLANTED
        return pipe.read()


def serve(number, port, is_stuck):
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0)
    store = dist.PrefixStore("engines", store)
    group = dist.ProcessGroup(store, number, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, number, 2, dist.default_pg_timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    for step in range(1000):
        if is_stuck and number == 1 and step == 20:
            read_request()
        dist.all_reduce(torch.ones(2), group=group)
        time.sleep(0.1)


def main():
    context = multiprocessing.get_context("spawn")
    engines = []
    for is_stuck in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for number in range(2):
            engines.append(context.Process(target=serve, args=(number, port, is_stuck)))
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()


if __name__ == "__main__":
    main()
