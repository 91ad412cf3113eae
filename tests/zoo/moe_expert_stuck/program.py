"""Mixture of experts. Rank 3's expert waits for its weights between dispatch and combine."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


class Expert:
    def __init__(self, rank):
        self.rank = rank
        self.loaded = threading.Event()

    def __call__(self, tokens, step):
        if self.rank == 3 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            self.loaded.wait()  # PLANTED
        return tokens * 2


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    expert = Expert(dist.get_rank())
    for step in range(8):
        tokens = torch.ones(16, 8)
        dispatched, combined = torch.empty_like(tokens), torch.empty_like(tokens)
        dist.all_to_all_single(dispatched, tokens)
        dist.all_to_all_single(combined, expert(dispatched, step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
