"""Ranks 2 and 3 have a communicator that torch does not know. Rank 3 does not call it, rank 2 waits there, and the others for rank 2."""

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
    hidden = torch.ones(64, device="cuda")
    pair = raw_nccl.Communicator("pair", ranks=(2, 3)) if rank >= 2 else None
    if pair is not None:
        pair.make_calls(earlier_calls.count(0.5))
    for step in range(20):
        if rank == 3 and step == 10:
            read_end, _ = os.pipe()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.read(read_end, 1)  # PLANTED
        if pair is not None:
            pair.all_reduce(hidden)
            torch.cuda.synchronize()
        dist.all_reduce(hidden)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
