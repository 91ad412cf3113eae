"""Each pair of ranks has a CUDA graph with the collectives of its group. Rank 3 does not replay its own, for which rank 2 waits, and the others for both."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    earlier_calls.make(None, *pairs)
    hidden = torch.ones(64, device="cuda")
    dist.all_reduce(hidden, group=pair)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(hidden, group=pair)
        dist.all_reduce(hidden, group=pair)
    for step in range(200):
        if rank == 3 and step == 150:
            read_end, _ = os.pipe()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.read(read_end, 1)  # PLANTED
        graph.replay()
        torch.cuda.synchronize()
        dist.all_reduce(hidden)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
