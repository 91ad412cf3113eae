"""A library calls NCCL itself. Rank 1 broadcasts where the others reduce."""

import os

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
    for step in range(20):
        if rank == 1 and step == 10:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            tensor_parallel.broadcast(hidden)
        else:
            tensor_parallel.all_reduce(hidden)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
