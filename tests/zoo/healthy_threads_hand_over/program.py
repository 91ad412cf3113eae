"""Several threads communicate over one group, each while the others wait for it: an executor's, a training thread's, the main one's."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist


def step():
    dist.all_reduce(torch.ones(64))


def train(done):
    earlier_calls.make(share=1 / 2)
    for _ in range(20):
        step()
        time.sleep(0.02)
    done.set()


def main():
    dist.init_process_group("gloo")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(earlier_calls.make, share=1 / 2).result()
        for _ in range(20):
            step()
            pool.submit(step).result()
    done = threading.Event()
    dist.barrier()
    thread = threading.Thread(target=train, args=(done,))
    thread.start()
    while not done.is_set():
        time.sleep(0.1)
    dist.barrier()
    thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
