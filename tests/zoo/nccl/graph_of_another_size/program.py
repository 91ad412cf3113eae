"""There is a CUDA graph for each batch size. Rank 3 replays another one than the others, with fewer collectives."""

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
    small = capture(hidden, layers=4)
    for step in range(20):
        if rank == 3 and step == 10:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            small.replay()  # PLANTED
        else:
            decode.replay()
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
