"""Rank 0 sends 3,000 quick messages of many sizes to rank 1, some of them in batches, and rank 1 as many back."""

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    for number in range(3000):
        size, back = 1 + number * 7 % 61, 1 + number * 5 % 31
        first, second = torch.ones(size), torch.ones(back, 2)
        if number % 10 == 0:
            operations = [
                dist.P2POp(dist.isend, first if rank == 0 else second, 1 - rank),
                dist.P2POp(dist.irecv, second.view(-1) if rank == 0 else first, 1 - rank),
            ]
            for work in dist.batch_isend_irecv(operations[:: 1 if rank else -1]):
                work.wait()
        elif rank == 0:
            dist.send(first, dst=1)
            dist.recv(second, src=1)
        else:
            dist.recv(first, src=0)
            dist.send(second, dst=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
