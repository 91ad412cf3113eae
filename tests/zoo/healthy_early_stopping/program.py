"""Ranks agree by an all-reduce on when to stop, and on whose loss is the best."""

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(1000):
        dist.all_reduce(torch.ones(64))
        patience_over = torch.tensor([int(rank == 2 and step == 30)])
        dist.all_reduce(patience_over, op=dist.ReduceOp.MAX)
        if patience_over.item():
            break
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, 1.0 / (rank + 1))
    best = min(range(len(losses)), key=losses.__getitem__)
    weights = torch.full((64,), float(rank))
    dist.broadcast(weights, src=best)
    assert weights[0] == best
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
