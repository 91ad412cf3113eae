"""Each message has a tag of its own, as in some pipelines and parameter servers. Rank 1 goes off into code of its own
before it sends the last one.
"""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

MESSAGES = 2000


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for number in range(MESSAGES):
        data = torch.full((8,), float(number))
        if rank == 0:
            dist.send(data, dst=1, tag=2 * number)
            dist.recv(data, src=1, tag=2 * number + 1)
        else:
            dist.recv(data, src=0, tag=2 * number)
            if number == MESSAGES - 1:
                upload_samples()
            dist.send(data, dst=0, tag=2 * number + 1)


if __name__ == "__main__":
    main()
