"""The workers of an engine wait for requests, each in its own queue, and none comes for long; then one comes."""

import queue
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def send_requests(requests):
    for request, pause_s in ((8, 0), (64, 14), (128, 0), (None, 0)):
        time.sleep(pause_s)
        requests.put(request)


def take_requests(requests):
    while (request := requests.get()) is not None:
        dist.all_reduce(torch.ones(request))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    requests = queue.Queue()
    threading.Thread(target=send_requests, args=(requests,)).start()
    take_requests(requests)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
