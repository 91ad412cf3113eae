"""Rank 1 has a torchrun of its own evaluate the model, and ends well."""

import subprocess
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist


def evaluate():
    """What the ranks of the inner torchrun do."""
    dist.init_process_group("gloo")
    earlier_calls.make(share=1 / 2)
    for _ in range(10):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.05)
    dist.destroy_process_group()


def main():
    if sys.argv[1:] == ["evaluate"]:
        return evaluate()
    dist.init_process_group("gloo")
    earlier_calls.make(share=1 / 2)
    for step in range(10):
        if step == 5 and dist.get_rank() == 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            subprocess.run([*torchrun, __file__, "evaluate"], check=True)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
