"""``hangwatch-server``: checks first, each with its remedy, then serves until it is told to stop."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO
from urllib.parse import quote

import uvicorn

from hangwatch import __version__

from .app import build
from .live import Live
from .settings import Settings, UsageError, load
from .store import Store, StoreError

USAGE, NOT_STARTED = 2, 3
TOKEN_FILE = "token"
BACKLOG = 2048  # connections: a large job's node agents come at once
LINGER = 2  # seconds that open requests get at the end


class StartError(Exception):
    """The server cannot start. The message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = load(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        for line in str(error).splitlines():
            print(f"hangwatch-server: {line}", file=sys.stderr)
        print("hangwatch-server: see hangwatch-server --help", file=sys.stderr)
        return USAGE
    logging.basicConfig(level=logging.WARNING, format="hangwatch: %(message)s")
    try:
        return _serve(settings)
    except (StartError, StoreError) as error:
        print(f"hangwatch-server: {error}", file=sys.stderr)
        return NOT_STARTED


def _serve(settings: Settings) -> int:
    with listen(settings.host, settings.port) as listening:
        database = settings.database.get_secret_value() if settings.database else None
        store = Store(settings.data_dir, database, settings.name)
        token = settings.token.get_secret_value() if settings.token else None
        if token is None and not _is_loopback(listening):
            token = kept_token(settings.data_dir)
        port = listening.getsockname()[1]
        base_url = f"http://{_reachable(settings.host)}:{port}"
        app, live = build(settings, store=store, base_url=base_url, token=token)
        announce(settings, base_url, token, sys.stdout, sys.stderr)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=LINGER, server_header=False, proxy_headers=False
        )
        server = _Server(config, live)
        # uvicorn raises the signal anew once it has stopped: these make that an ordinary end.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        server.run(sockets=[listening])
        store.close()
    return 0 if server.started else NOT_STARTED


class _Server(uvicorn.Server):
    """Ends the event streams, which would never end by themselves, as soon as a signal asks to stop."""

    def __init__(self, config: uvicorn.Config, live: Live) -> None:
        super().__init__(config)
        self._live = live

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._live.watch.events.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror or error}; give an address of this machine, such as 0.0.0.0") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        remedy = {
            errno.EADDRINUSE: f"port {port} of {host} is in use: is another hangwatch-server running? "
            "Stop it, or choose another with --port (0 takes a free one)",
            errno.EACCES: f"port {port} needs privileges: choose one above 1023 with --port",
            errno.EADDRNOTAVAIL: f"{host} is no address of this machine: choose one with --host, such as 0.0.0.0",
        }
        raise StartError(remedy.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror or error}")) from None
    return made


def kept_token(data_dir: Path) -> str:
    """This data folder's own token, made the first time: a server that is started again is found by the agents of before."""
    path = data_dir / TOKEN_FILE
    try:
        if kept := path.read_text().strip():
            return kept
    except FileNotFoundError:
        pass  # the first start
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}; make it readable, or give a token with --token") from None
    token = secrets.token_urlsafe()
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}; give a token with --token") from None
    return token


def announce(settings: Settings, base_url: str, token: str | None, out: TextIO, messages: TextIO) -> None:
    """The line that training jobs need on ``out``; the rest, for people, on ``messages``."""
    print(f"hangwatch-server {__version__}: dashboard at {base_url}/ranks, incidents in {settings.data_dir}", file=messages, flush=True)
    shown = ""
    if settings.token is not None:  # known to whoever gave it, so it stays out of logs
        print("hangwatch-server: jobs and people need the token that was given: HANGWATCH_TOKEN", file=messages, flush=True)
    elif token is not None:
        shown = f":{quote(token, safe='')}@"
    print(f"HANGWATCH_URL={base_url.replace('://', '://' + shown)}", file=out, flush=True)


def _is_loopback(listening: socket.socket) -> bool:
    address = str(listening.getsockname()[0])
    return address.startswith("127.") or address == "::1"


def _reachable(host: str) -> str:
    """The name by which others reach an address that is listened on."""
    if host in ("0.0.0.0", "::", ""):
        name = socket.getfqdn()
        return socket.gethostname() if name.startswith("localhost") else name
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
