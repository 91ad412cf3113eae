"""Rank 0 starts a send that rank 1 receives only after a reduction, for which all wait 7 seconds.
Before, it has made the same send and waited for it.
"""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    hidden, loss = torch.ones(64).to("cuda"), torch.ones(4).to("cuda")
    # The first message makes the communicator of the pair, for which its host waits.
    if rank == 0:
        dist.send(hidden, dst=1)
    if rank == 1:
        dist.recv(hidden, src=0)
    for step in range(12):
        if rank == 0:
            sent = dist.isend(hidden, dst=1)
        if step == 6:
            device_faults.launch_sleep_kernel(7)
        dist.all_reduce(loss)
        loss[0].item()
        if rank == 0:
            sent.wait()
        if rank == 1:
            dist.recv(hidden, src=0)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
