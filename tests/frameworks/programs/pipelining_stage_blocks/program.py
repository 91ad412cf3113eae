"""A pipeline schedule of torch's. The last stage waits for its labels."""

import os
import threading

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def read_labels(lock):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    lock.acquire()  # PLANTED


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lock = threading.Lock()
    lock.acquire()
    stage = PipelineStage(torch.nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    for step in range(6):
        if rank == 0:
            schedule.step(torch.randn(4, 8))
        else:
            if step == 4:
                read_labels(lock)
            schedule.step()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
