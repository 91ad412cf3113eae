"""Many small groups, each with its own number of calls, and collectives on Python objects."""

import itertools

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [(members, dist.new_group(list(members))) for n in (2, 3) for members in itertools.combinations(range(world_size), n)]
    earlier_calls.make(None, *(group for _, group in groups))
    for turn, (members, group) in enumerate(groups):
        if rank in members:
            for _ in range(turn + 1):
                dist.all_reduce(torch.ones(4), group=group)
            found = [None] * len(members)
            dist.all_gather_object(found, {"rank": rank, "notes": "x" * (10 * rank)}, group=group)
            assert [f["rank"] for f in found] == list(members)
    config = [{"lr": 0.1, "seed": 7}] if rank == 0 else [None]
    dist.broadcast_object_list(config, src=0)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(("rank", rank, [0] * (3 * rank)), gathered, dst=0)
    mine = [None]
    dist.scatter_object_list(mine, ["a", "bb", "ccc", "dddd"] if rank == 0 else None, src=0)
    assert len(mine[0]) == rank + 1
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
