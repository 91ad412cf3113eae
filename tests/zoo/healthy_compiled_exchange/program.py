"""A compiled layer exchanges tokens by an asynchronous call, at which its graph breaks; one rank keeps more tokens to
itself from step to step, so that each rank compiles for other shapes.
"""

import earlier_calls
import torch
import torch.distributed as dist


def exchange(x, splits):
    tokens = x + 1
    received = torch.empty_like(tokens)
    dist.all_to_all_single(received, tokens, splits, splits, async_op=True).wait()
    return received * 2


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    layer = torch.compile(exchange, backend="eager")
    for step in range(40):
        own = 4 + (step % 7 if rank == 0 else 0)
        splits = [own, 4] if rank == 0 else [4, own]
        layer(torch.ones(sum(splits), 3), splits)
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
