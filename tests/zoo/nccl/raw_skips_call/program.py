"""A library calls NCCL itself. Rank 3 leaves the last reduction of the step out, and reads its next input, which comes only after it."""

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
        skips = rank == 3 and step == 10
        for layer in range(8):
            if not (skips and layer == 7):
                tensor_parallel.all_reduce(hidden)
        if skips:
            read_end, _ = os.pipe()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.read(read_end, 1)  # PLANTED
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
