"""A library calls NCCL itself, in turn with torch."""

import os

import earlier_calls
import raw_nccl
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(share=0.5)
    tensor_parallel = raw_nccl.Communicator("tp")
    tensor_parallel.make_calls(earlier_calls.count(0.5))
    hidden = torch.ones(64, device="cuda")
    for _ in range(200):
        tensor_parallel.all_reduce(hidden)
        dist.all_reduce(hidden)
        torch.cuda.synchronize()
    tensor_parallel.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
