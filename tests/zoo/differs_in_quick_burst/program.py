"""Rank 1 reduces with the maximum in one of thousands of quick calls, where its peers sum. All of them complete, and the
job goes on for long before a heartbeat shows that something differed."""
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for call in range(2000):
        if call == 990 and rank == 1:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)  # PLANTED
        else:
            dist.all_reduce(torch.ones(1))
    time.sleep(10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
