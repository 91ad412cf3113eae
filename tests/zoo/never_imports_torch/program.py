"""Rank 1 waits for a licence before it even imports torch, so torch knows nothing of it.

No call comes before the fault: nobody has a process group yet.
"""

import os
import time


def wait_for_licence():
    time.sleep(600)  # PLANTED


def main():
    if os.environ["RANK"] == "1":
        wait_for_licence()

    import torch
    import torch.distributed as dist

    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
