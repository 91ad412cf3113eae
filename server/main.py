"""``hangwatch-server``: checks the configuration, then serves until a signal stops it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import secrets
import signal
import socket
import ssl
import sys
from pathlib import Path
from urllib.parse import quote

from hangwatch import __version__
from hangwatch.model.ownership import check_ownership

from .alerting.alerter import send_test_messages
from .app import build_app
from .core import limits, load
from .core.logs import configure_logging
from .http.connections import HttpServer
from .settings import (
    CONFIG_FILE_NAME,
    TEST_ALERT_FLAG,
    Settings,
    SettingsError,
    load_settings,
    reveal_secret,
)
from .storage.database import StoreError
from .storage.store import Store

FAILED, USAGE, NOT_STARTED = 1, 2, 3
TOKEN_FILE = "token"
BACKLOG = 2048  # a large job's node agents connect at the same time
SHUTDOWN_GRACE_S = 2  # the time that open requests have to end
# The event loop's wait at each read and write while another thread reads a large job.
SWITCH_INTERVAL_S = 5e-4
MIN_TOKEN_LENGTH = 16  # characters


class StartError(Exception):
    """The server cannot start. The message has the reason and the remedy."""


def main() -> int:
    try:
        settings = load_settings(sys.argv[1:])
    except SettingsError as error:
        for line in str(error).splitlines():
            _print_message(line)
        _print_message("see hangwatch-server --help")
        return USAGE
    configure_logging()
    if TEST_ALERT_FLAG in sys.argv:
        channels = settings.make_alert_channels()
        if not channels:
            _print_message("there is no alert channel to test: give --alert URL or --alert-command")
            return USAGE
        results = send_test_messages(channels, _find_base_url(settings, settings.port))
        for name, problem in results:
            print(f"{name}: {problem or 'accepted the message'}")
        return FAILED if any(problem for _, problem in results) else 0
    try:
        return _serve(settings)
    except (StartError, StoreError) as error:
        _print_message(str(error))
        return NOT_STARTED


def _print_message(message: str) -> None:
    print(f"hangwatch-server: {message}", file=sys.stderr, flush=True)


def _serve(settings: Settings) -> int:
    os.umask(0o077)  # incidents show stacks, and the data folder may exist already
    _check_certificate(settings)
    # A large job has more hosts than the usual 1024 open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(*load.THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with listen(settings.host, settings.port) as listening:
        store = Store(settings.data_dir, reveal_secret(settings.database), settings.name)
        token = reveal_secret(settings.token)
        address, port = listening.getsockname()[:2]
        if token is None and not (address.startswith("127.") or address == "::1"):
            token = kept_token(settings.data_dir)
        base_url = _find_base_url(settings, port)
        app, state = build_app(settings, store=store, base_url=base_url, token=token)
        listening.peers = state.peers
        announce(settings, base_url, token)
        server = HttpServer(
            state,
            app,
            loop="asyncio",
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            timeout_keep_alive=limits.KEEP_ALIVE_S,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        # uvicorn raises the signal again after it has stopped: so the exit is normal.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        server.run(sockets=[listening])
        store.close()
    return 0 if server.started else NOT_STARTED


def _check_certificate(settings: Settings) -> None:
    """Raises StartError where uvicorn could not serve TLS."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=lambda: b""
        )
    except OSError as error:  # the base class of ssl.SSLError
        why = getattr(error, "reason", None) or error.strerror or error
        files = f"--tls-cert {settings.tls_cert}"
        if settings.tls_key:
            files = f"{files}, --tls-key {settings.tls_key}"
        raise StartError(
            f"{files}: {why}; both should be readable PEM files that belong together, the key"
            " without a passphrase"
        ) from None


def listen(host: str, port: int) -> load.ThrottledListener:
    """A listening socket. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(
            f"--host {host}: {error.strerror or error}; give an address of this machine, such as"
            " 0.0.0.0"
        ) from None
    listening = load.ThrottledListener(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        explanations = {
            errno.EADDRINUSE: (
                f"port {port} of {host} is in use: is another hangwatch-server running? "
                "Stop it, or choose another with --port (0 takes a free one)"
            ),
            errno.EACCES: f"port {port} needs privileges: choose one above 1023 with --port",
            errno.EADDRNOTAVAIL: (
                f"{host} is not an address of this machine: choose one with --host, such as 0.0.0.0"
            ),
        }
        other = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise StartError(explanations.get(error.errno or 0, other)) from None
    return listening


def kept_token(data_dir: Path) -> str:
    """The token of this data folder, valid after a restart, too. Raises StartError."""
    path = data_dir / TOKEN_FILE
    try:
        path.touch(mode=0o600)
        check_ownership(path)
        if path.stat().st_mode & 0o077:
            raise PermissionError(f"{path} can be read by other users (chmod go-rwx)")
        token = path.read_text().strip()
        if not token:
            token = secrets.token_urlsafe()
            path.write_text(f"{token}\n")
    except OSError as error:
        raise StartError(
            f"the token of this server in {path}: {error.strerror or error}; make the file this user's"
            " alone, or give a token with --token"
        ) from None
    return token


def announce(settings: Settings, base_url: str, token: str | None) -> None:
    """Prints the line that training jobs need to stdout, and messages for users to stderr."""
    places = f"dashboard at {base_url}/ranks, incidents in {settings.data_dir}"
    config_file = Path(CONFIG_FILE_NAME)
    if config_file.is_file():
        places = f"{places}, settings from {config_file.absolute()}"
    print(f"hangwatch-server {__version__}: {places}", file=sys.stderr, flush=True)
    shown = ""
    if settings.on_hang == "abort":
        kinds = ", ".join(kind.value for kind in settings.abort_kinds)
        _print_message(f"ranks are ended {settings.abort_after:g} s after an alert ({kinds})")
    if settings.token is not None:  # the operator knows this token, so it is not logged
        _print_message("jobs and people need the token that was given: HANGWATCH_TOKEN")
        if len(settings.token) < MIN_TOKEN_LENGTH:
            _print_message(f"a token of less than {MIN_TOKEN_LENGTH} characters can be guessed")
    elif token is not None:
        shown = f":{quote(token, safe='')}@"
    print(f"HANGWATCH_URL={base_url.replace('://', '://' + shown)}", flush=True)


def _find_base_url(settings: Settings, port: int) -> str:
    """The address at which other machines reach this server."""
    if settings.public_url:
        return settings.public_url
    host = settings.host
    if host in ("0.0.0.0", "::"):
        name = socket.getfqdn()
        host = socket.gethostname() if name.startswith("localhost") else name
    elif ":" in host:
        host = f"[{host}]"
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{port}{settings.path_prefix}"
