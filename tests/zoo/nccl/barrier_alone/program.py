"""Three ranks are at the barrier after an epoch; rank 2 still writes its log to a server that does not answer."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def send_log():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for epoch in range(3):
        for _ in range(5):
            dist.all_reduce(loss)
        if rank == 2 and epoch == 1:
            send_log()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
