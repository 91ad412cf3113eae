"""Two hosts on one machine: network namespaces with names of their own, cabled to a switch for data
and to one for the server.

A namespace lives as long as the process that holds it, which ends with its parent: even a test that
is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .job import LaunchedJob
from .processes import clean_environment

DATA, SERVER = "data", "server"  # the two networks, and each host's interface in it
_REQUIRED_TOOLS = ("ip", "unshare", "nsenter")
# Lost packets are resent within a second after a cable is plugged in again, on kernels that have this
# setting (Linux 6.15).
_SHORTEN_TCP_RTO = "echo 1000 > /proc/sys/net/ipv4/tcp_rto_max_ms || true"


def namespaces_unavailable() -> str | None:
    """The reason why no namespaces can be created on this machine; None if they can."""
    try:
        with _Namespace("probe"):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return (
            "no network namespaces here: needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, and"
            f" {', '.join(_REQUIRED_TOOLS)} ({error})"
        )


class _Namespace:
    """A network and UTS namespace, and the process that holds it. Raises OSError or
    CalledProcessError if creating it is not permitted.
    """

    def __init__(self, name: str) -> None:
        ready = (
            f"echo {name} > /proc/sys/kernel/hostname && ip link set lo up && {{"
            f" {_SHORTEN_TCP_RTO}; }} 2> /dev/null && echo ready && exec cat"
        )
        command = ["unshare", "--net", "--uts", "sh", "-c", ready]
        self.name = name
        self._keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None and self._keeper.stderr is not None
        if self._keeper.stdout.readline() != "ready\n":
            reason = self._keeper.stderr.read()
            self.close()
            raise OSError(reason.strip())

    def __enter__(self) -> _Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def wrap_command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in here."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--", *command]

    def run_ip(self, command: str) -> None:
        subprocess.run(self.wrap_command(["ip", *command.split()]), check=True, capture_output=True)

    def close(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            if pipe is not None:
                pipe.close()
        self._keeper.kill()
        self._keeper.wait()


@dataclass(slots=True)
class TwoHostNetwork:
    """Hosts 0 and 1, and where they are reached. The server listens on `server`, an address of this
    machine.
    """

    server: str
    hosts: tuple[_Namespace, ...]
    _switches: _Namespace

    def cut_cables(self, host: int, *networks: str) -> None:
        """Pulls cables: no packet passes, and both sides only see that the carrier is gone."""
        for network in networks:
            self._switches.run_ip(f"link set {network}{host} down")

    def restore_cables(self, host: int, *networks: str) -> None:
        for network in networks:
            self._switches.run_ip(f"link set {network}{host} up")

    def set_blackhole(self, on: bool) -> None:
        """The data switch swallows what the hosts send one another; the cables stay in."""
        for host in range(len(self.hosts)):
            self._switches.run_ip(
                f"link set {DATA}{host} type bridge_slave isolated {'on' if on else 'off'}"
            )

    def launch_jobs(
        self,
        program: Path,
        ranks: int,
        folder: Path,
        url: str,
        *,
        name: str = "job",
        env: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> list[LaunchedJob]:
        """Starts `program` with as many ranks on each host; `env` is added to each host's
        environment.
        """
        return [
            self._launch_on_host(host, program, ranks, folder / f"host{host}", url, name, env[host])
            for host in range(len(self.hosts))
        ]

    def _launch_on_host(
        self,
        host: int,
        program: Path,
        ranks: int,
        folder: Path,
        url: str,
        name: str,
        env: Mapping[str, str],
    ) -> LaunchedJob:
        (folder / "run").mkdir(parents=True)
        options = [
            f"--nnodes={len(self.hosts)}",
            f"--node-rank={host}",
            f"--nproc-per-node={ranks}",
        ]
        options += [f"--master-addr={_data_address(0)}", "--master-port=29500"]
        variables = {
            "HANGWATCH_URL": url,
            "HANGWATCH_JOB": name,
            "HANGWATCH_RUN_DIR": str(folder / "run"),
            "PLANTED_AT": str(folder / "planted"),
            "GLOO_SOCKET_IFNAME": DATA,
            **env,
        }
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(program)]
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                self.hosts[host].wrap_command(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=clean_environment(**variables),
                cwd=folder,
                start_new_session=True,
            )
        return LaunchedJob(name, folder, process)


def _data_address(host: int) -> str:
    return f"10.0.0.{host + 1}"


@contextlib.contextmanager
def create_network() -> Iterator[TwoHostNetwork]:
    """Two hosts, for the length of the block. Raises OSError or CalledProcessError where that is
    not allowed.
    """
    mine = os.getpid()
    # The only part of it that this machine sees; others may test here at the same time.
    outside, subnet = f"hw{mine}", f"10.{64 + mine // 256 % 64}.{mine % 256}"
    with contextlib.ExitStack() as stack:
        switches = stack.enter_context(_Namespace("switches"))
        hosts = tuple(stack.enter_context(_Namespace(f"node{host}")) for host in range(2))
        for name in (DATA, SERVER):
            switches.run_ip(f"link add {name} type bridge")
            switches.run_ip(f"link set {name} up")
        for number, host in enumerate(hosts):
            for name, address in (
                (DATA, _data_address(number)),
                (SERVER, f"{subnet}.{number + 2}"),
            ):
                switches.run_ip(
                    f"link add {name}{number} master {name} type veth peer name {name} netns"
                    f" {host.pid}"
                )
                switches.run_ip(f"link set {name}{number} up")
                host.run_ip(f"address add {address}/24 dev {name}")
                host.run_ip(f"link set {name} up")
        switches.run_ip(
            f"link add port master {SERVER} type veth peer name {outside} netns {os.getpid()}"
        )
        switches.run_ip("link set port up")
        for step in (f"address add {subnet}.1/24 dev {outside}", f"link set {outside} up"):
            subprocess.run(["ip", *step.split()], check=True, capture_output=True)
        yield TwoHostNetwork(f"{subnet}.1", hosts, switches)
