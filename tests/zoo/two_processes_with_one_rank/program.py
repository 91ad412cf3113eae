"""The launcher's script gives the third process the rank of the second one, so that no process is rank 2.

No call comes before the fault: nobody has a process group yet.
"""

import os

import torch.distributed as dist


def main():
    os.environ["RANK"] = str(min(1, int(os.environ["RANK"])))
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
