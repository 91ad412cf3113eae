"""All ranks are in init_process_group, and the store takes their connections but never answers.

No call comes before the fault: nobody has a process group yet.
"""

import os
import socket
import subprocess
import sys
import threading
import time

import torch.distributed as dist


def forward(near, port, opens_at):
    """Connects to the store at ``opens_at``, and copies both ways."""
    time.sleep(max(0.0, opens_at - time.time()))
    far = socket.create_connection(("127.0.0.1", port))
    threading.Thread(target=copy, args=(near, far), daemon=True).start()
    copy(far, near)


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass


def serve(listener, port, opens_at):
    while True:
        near, _ = listener.accept()
        threading.Thread(target=forward, args=(near, port, opens_at), daemon=True).start()


def launch(opens_in_s):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    opens_at = time.time() + opens_in_s
    threading.Thread(target=serve, args=(listener, store.port, opens_at), daemon=True).start()
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared["MASTER_PORT"] = str(listener.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | shared | {"RANK": str(rank)})
        for rank in range(3)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


def train():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        launch(3600)
