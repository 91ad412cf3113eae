"""A thread of rank 1 imports a module that waits while it is imported. The main thread imports it, too, and waits for the import lock."""

import importlib
import os
import sys
import tempfile
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist

MODULE = "import threading; threading.Event().wait()"


def load_plugin():
    return importlib.import_module("hangs_in_import")


def train(rank):
    for step in range(20):
        if rank == 1 and step == 10:
            threading.Thread(target=load_plugin, daemon=True).start()
            time.sleep(0.5)
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            load_plugin()  # PLANTED
        dist.all_reduce(torch.ones(8))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "hangs_in_import.py"), "w") as module:
            module.write(MODULE)
        sys.path.insert(0, folder)
        train(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
