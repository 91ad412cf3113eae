"""Two ranks exchange large tensors, and both send before they receive."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 0))
    rank = dist.get_rank()
    dist.barrier()
    halo = torch.ones(1 << 24)
    incoming = torch.empty_like(halo)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.send(halo, dst=1 - rank)  # PLANTED
    dist.recv(incoming, src=1 - rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
