"""Three threads communicate at the same time, each over a process group of its own, at a pace of its own."""

import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def communicate(group, pause, turns):
    earlier_calls.make(group, share=1 / 3)
    for _ in range(turns):
        dist.all_reduce(torch.ones(64), group=group)
        time.sleep(pause * (1 + dist.get_rank()))


def main():
    dist.init_process_group("gloo")
    groups = [dist.new_group() for _ in range(3)]
    threads = [threading.Thread(target=communicate, args=(group, 0.03 * n, 30)) for n, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
