"""A CUDA graph has the collectives of a step. Rank 2 waits for a request that never comes, and does not replay the graph."""

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
        if rank == 2 and step == 10:
            read_end, _ = os.pipe()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.read(read_end, 1)  # PLANTED
        decode.replay()
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
