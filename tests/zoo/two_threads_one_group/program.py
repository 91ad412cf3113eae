"""A thread averages metrics over the same group that the training reduces its gradients in. It goes well, by luck."""

import os
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def average_metrics():
    time.sleep(0.5)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    for _ in range(40):
        dist.all_reduce(torch.ones(64))
        time.sleep(0.05)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    thread = threading.Thread(target=average_metrics)
    thread.start()
    for _ in range(40):
        dist.all_reduce(torch.ones(64))
        time.sleep(0.05)
    thread.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
