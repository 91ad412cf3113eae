"""Some calls of a rank raise before they communicate: a wrong root, a buffer that is too small, a group with a rank
named twice. The script catches that, and makes them again as it should.
"""

import earlier_calls
import torch
import torch.distributed as dist


def gather(room):
    dist.all_gather_into_tensor(torch.empty(room * 4), torch.ones(4))


def broadcast_from(source, group=None):
    dist.broadcast(torch.ones(4), src=source, group=group)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(60):
        if step % 20 == 9 and rank == 0:
            try:
                broadcast_from(world_size + 4)
            except RuntimeError as error:
                print("caught", error)
        dist.all_reduce(torch.ones(4))
        try:
            gather(world_size - 1 if rank == 1 and step % 7 == 3 else world_size)
        except RuntimeError:
            gather(world_size)
        if step == 30:
            try:
                group = dist.new_group([0, 0, 1] if rank == 2 else [0, 1])
            except ValueError:
                group = dist.new_group([0, 1])
            if rank < 2:
                broadcast_from(1, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
