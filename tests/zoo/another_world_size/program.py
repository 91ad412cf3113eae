"""Rank 2 was started for a job of four ranks, its peers for one of three.

No call comes before the fault: nobody has a process group yet.
"""

import os

import torch.distributed as dist


def main():
    if os.environ["RANK"] == "2":
        os.environ["WORLD_SIZE"] = "4"
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")  # PLANTED
    dist.barrier()


if __name__ == "__main__":
    main()
