"""Legal differences between ranks: views of one size, uneven all-to-all, lists that only the root has."""

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(5):
        weights = torch.ones(8, 8) if rank == 0 else torch.ones(64)
        dist.broadcast(weights, src=0)
        dist.all_reduce(torch.ones(4, 6) if rank == 0 else torch.ones(2, 12))

        # Rank i sends j + 1 rows more than i to rank j.
        sent = [rank + peer + 1 for peer in range(world_size)]
        received = [peer + rank + 1 for peer in range(world_size)]
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)

        pieces = [torch.empty(8) for _ in range(world_size)] if rank == 0 else None
        dist.gather(torch.ones(8), pieces, dst=0)
        dist.scatter(torch.empty(8), [torch.ones(8)] * world_size if rank == 1 else None, src=1)

        uneven = [torch.empty(3 + peer) for peer in range(world_size)]
        for peer in range(world_size):
            dist.broadcast(uneven[peer], src=peer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
