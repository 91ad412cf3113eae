"""Mixture of experts. Rank 2 makes room for fewer tokens than its peers send to it."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(8):
        sent = [4] * world_size
        room = [3 if rank == 2 and step == 5 and peer != rank else 4 for peer in range(world_size)]
        if sum(room) < sum(sent):
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        tokens, received = torch.ones(sum(sent), 1024), torch.empty(sum(room), 1024)
        dist.all_to_all_single(received, tokens, room, sent)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
