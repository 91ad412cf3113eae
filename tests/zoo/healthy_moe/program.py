"""Mixture of experts: counts first, then tokens, uneven and different at every step; some experts get none."""

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for step in range(15):
        sent = torch.randint(0, 5, (world_size,), generator=generator)
        sent[(rank + step) % world_size] = 0
        room = torch.empty_like(sent)
        dist.all_to_all_single(room, sent)
        tokens, received = torch.ones(int(sent.sum()), 8), torch.empty(int(room.sum()), 8)
        dist.all_to_all_single(received, tokens, room.tolist(), sent.tolist())
        dist.all_to_all_single(tokens, received * 2, sent.tolist(), room.tolist())
        assert (tokens == 2).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
