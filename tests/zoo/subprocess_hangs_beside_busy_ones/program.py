"""Rank 0 waits for a program that never ends, while a thread and an older child that it does not wait for use the CPU."""

import os
import subprocess
import threading

import earlier_calls
import torch
import torch.distributed as dist


def monitor():
    while True:
        sum(range(10000))


def evaluate():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    subprocess.run(["sleep", "600"], check=True)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for epoch in range(3):
        if dist.get_rank() == 0 and epoch == 1:
            threading.Thread(target=monitor, daemon=True).start()
            with subprocess.Popen(["dd", "if=/dev/zero", "of=/dev/null", "bs=64k"]) as busy:
                evaluate()
                busy.kill()
        dist.barrier()
        for _ in range(5):
            dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
