"""A kernel of six seconds on stage 1 of a pipeline, longer than the limit of the tests' server; the hosts wait for their devices."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(None, (0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0))
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    hidden, gradient = torch.ones(64).to("cuda"), torch.ones(64).to("cuda")
    dist.barrier()
    for step in range(20):
        if rank == 1 and step == 10:
            device_faults.launch_sleep_kernel(6)
        if rank > 0:
            dist.recv(hidden, src=rank - 1)
        if rank < last:
            dist.send(hidden, dst=rank + 1)
            dist.recv(gradient, src=rank + 1)
        if rank > 0:
            dist.send(gradient, dst=rank - 1)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
