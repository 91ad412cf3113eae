"""A library calls NCCL itself; one rank after the other is 2 seconds late."""

import os
import time

import earlier_calls
import raw_nccl
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(share=0.5)
    rank = dist.get_rank()
    tensor_parallel = raw_nccl.Communicator("tp")
    tensor_parallel.make_calls(earlier_calls.count(0.5))
    hidden = torch.ones(64, device="cuda")
    for late_rank in range(4):
        if rank == late_rank:
            time.sleep(2)
        tensor_parallel.all_reduce(hidden)
        torch.cuda.synchronize()
    tensor_parallel.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
