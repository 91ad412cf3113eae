"""A pool makes the calls; between them, the main thread of rank 1 waits for a file that nobody writes."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist


def wait_for_config(path):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    while not os.path.exists(path):
        time.sleep(0.2)  # PLANTED


def main():
    dist.init_process_group("gloo")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(earlier_calls.make).result()
        for step in range(10):
            if dist.get_rank() == 1 and step == 5:
                wait_for_config("never-written.json")
            pool.submit(dist.all_reduce, torch.ones(64)).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
