"""Makes CALLS quick calls of many kinds, some with a shape that was never used before, then rank 1 calls something else or stops, as FAULT says.

Each rank writes its memory to MEMORY_DIR/RANK after each tenth of them.
"""

import os
import random
import time

import torch
import torch.distributed as dist


def read_resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def exchange(rank, size, x, y):
    """Around the ring, without blocking."""
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
    for work in works:
        work.wait()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    call_count = int(os.environ["CALLS"])
    chosen = random.Random(int(os.environ["SEED"]))  # the same on all ranks
    tensors = [torch.zeros(n) for n in range(1, 40)]
    received = torch.zeros(1)
    with open(f"{os.environ['MEMORY_DIR']}/{rank}", "w") as memory:
        for number in range(call_count):
            kind, x = chosen.randrange(20), tensors[chosen.randrange(len(tensors))]
            if kind == 0:
                exchange(rank, size, tensors[0], received)
            elif kind == 1:
                dist.broadcast(x, number % size)
            elif kind == 2:
                if rank < 2:
                    dist.all_reduce(x, group=pair)
            elif kind == 3:
                dist.all_reduce(x, async_op=True).wait()
            elif kind == 4:
                dist.all_reduce(torch.zeros([int(digit) + 1 for digit in f"{number:06}"]))  # new
            else:
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
            if number % (call_count // 10) == 0:
                memory.write(f"{read_resident_mb()}\n")
                memory.flush()
    if rank == 1:
        open(os.environ["PLANTED_AT"], "w").close()
        if os.environ["FAULT"] == "mismatch":
            dist.broadcast(tensors[3], 0)  # planted: mismatch
        else:
            time.sleep(3600)  # planted: missing_rank
    dist.all_reduce(tensors[3])
    dist.all_reduce(tensors[3])


if __name__ == "__main__":
    main()
