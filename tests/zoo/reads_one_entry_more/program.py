"""One rank's config has an entry more, so that it broadcasts one length more than the others; all get through, and it unpickles nothing."""

import os
import pickle

import earlier_calls
import torch
import torch.distributed as dist


def share(entries):
    pickled = [torch.tensor(list(pickle.dumps(entry)), dtype=torch.uint8) for entry in entries]
    lengths = torch.tensor([len(p) for p in pickled]) if dist.get_rank() == 0 else torch.zeros(len(entries), dtype=torch.long)
    dist.broadcast(lengths, src=0)  # PLANTED
    data = torch.cat(pickled) if dist.get_rank() == 0 else torch.empty(int(lengths.sum()), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return [pickle.loads(bytes(part.tolist())) for part in data.split(lengths.tolist())]


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(8):
        entries = [{"lr": 0.1}, "adam"] if dist.get_rank() == 0 else [None, None]
        if dist.get_rank() == 2 and step == 5:
            entries.append(None)
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        share(entries)
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
