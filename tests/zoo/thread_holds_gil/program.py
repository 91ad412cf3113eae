"""On rank 0 a thread that reads the temperature never returns from its driver, and keeps the GIL from the training."""
import ctypes
import os
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist

driver = ctypes.PyDLL(None)


def watch_temperature():
    time.sleep(0.5)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    driver.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        threading.Thread(target=watch_temperature, daemon=True).start()
    for _ in range(200):
        time.sleep(0.02)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
