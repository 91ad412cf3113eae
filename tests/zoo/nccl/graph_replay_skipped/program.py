"""A CUDA graph has the collectives of a step. Rank 1 finds its batch empty, and goes on to the collective after the replay, one call
behind the others. That it makes another call is no mismatch: torch.compile decides on each rank when to capture."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def capture(tensor, layers):
    """A step with so many all-reduces, as serving captures it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(layers):
            dist.all_reduce(tensor)
    return graph


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(share=0.5)
    rank = dist.get_rank()
    hidden = torch.ones(64, device="cuda")
    dist.all_reduce(hidden)
    torch.cuda.synchronize()
    decode = capture(hidden, layers=8)
    for number in range(earlier_calls.count(0.5)):
        decode.replay()
        if number % 50 == 49:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for step in range(20):
        if not (rank == 1 and step == 10):
            decode.replay()
        else:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.broadcast(hidden, src=0)
        torch.cuda.synchronize()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
