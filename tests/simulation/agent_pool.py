"""A process with the node agents of many simulated hosts, which obeys orders over a pipe."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from multiprocessing.connection import Connection

from hangwatch.model.kinds import VerdictKind

from .parallel_job import JobRun
from .simulated_node_agent import AgentCounts, SimulatedNodeAgent

_EXITS_PER_S = 300  # hosts that report their end in a second when the job ends


class NodeAgentPool:
    """The node agents of one process."""

    def __init__(self, port: int, hosts: range, run: JobRun) -> None:
        self.loop = asyncio.get_running_loop()
        self.port, self.run, self.counts = port, run, AgentCounts()
        self.agents = [SimulatedNodeAgent(self, host) for host in hosts]
        # An address for each process, since each has only 28,000 ports.
        self._address = f"127.0.{random.randrange(256)}.{random.randrange(1, 255)}"
        self._connecting: set[asyncio.Task[None]] = set()

    def connect_agent(self, agent: SimulatedNodeAgent) -> None:
        async def open_connection() -> None:
            try:
                await self.loop.create_connection(
                    lambda: agent, "127.0.0.1", self.port, local_addr=(self._address, 0)
                )
            except OSError:
                agent.handle_failure()

        task = self.loop.create_task(open_connection())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def start_run(self, run: JobRun, ramp_s: float) -> None:
        """Starts an attempt; its hosts first report within ``ramp_s``."""
        self.run = run
        for agent in self.agents:
            agent.begin_attempt()
            agent.delay_heartbeat(random.uniform(0.0, ramp_s))

    def change_run(self, run: JobRun) -> None:
        """Applies new faults or the end of the run. Exits of ranks are reported immediately, and
        the end of all within the seconds that a launcher takes.
        """
        before, self.run = self.run, run
        exits = (VerdictKind.DEAD_RANK, VerdictKind.EXITED_RANK)
        exit_hosts = {f.host for f in run.faults if f.kind in exits and f not in before.faults}
        now = time.monotonic()
        for agent in self.agents:
            if agent.host.number in exit_hosts:
                exit_delay_s = max(0.0, run.faults[-1].starts_at - now) + 0.01
                self.loop.call_later(exit_delay_s, agent.report_exit)
            elif run.ended_at < float("inf"):
                end_delay_s = max(0.0, run.ended_at - now)
                spread_s = random.uniform(0.0, len(self.agents) / _EXITS_PER_S)
                agent.delay_heartbeat(end_delay_s + spread_s)
        if len(run.faults) > len(before.faults):
            self._schedule_scans()

    def is_silent(self, host: int, now: float) -> bool:
        fault = self.run.active_fault(now)
        return fault is not None and fault.kind is VerdictKind.LOST_NODE and fault.host == host

    def count_finished(self) -> int:
        return sum(agent.is_finished for agent in self.agents)

    def _schedule_scans(self) -> None:
        """Scans the hosts of the fault's replica. All others wait and have nothing to report."""
        fault, pipeline = self.run.faults[-1], self.run.shape.pipeline
        first_host = fault.host // pipeline * pipeline
        replica_hosts = range(first_host, first_host + pipeline)
        for agent in self.agents:
            if fault.kind is VerdictKind.GROUP_MISMATCH or agent.host.number in replica_hosts:
                agent.schedule_scans(fault)


async def _run_pool(
    port: int, hosts: range, run: JobRun, ramp_s: float, orders: Connection
) -> None:
    pool = NodeAgentPool(port, hosts, run)
    pool.start_run(run, ramp_s)
    stopped = asyncio.Event()

    def handle_order() -> None:
        try:
            order, value = orders.recv()
        except EOFError:
            order, value = "stop", None
        if order == "stop":
            stopped.set()
        elif order == "start":
            pool.start_run(*value)
        elif order == "change":
            pool.change_run(value)
        elif order == "counts":
            orders.send((pool.counts, time.process_time(), pool.count_finished()))
            pool.counts = AgentCounts()

    pool.loop.add_reader(orders.fileno(), handle_order)
    await stopped.wait()


def run_agent_pool(port: int, hosts: range, run: JobRun, ramp_s: float, orders: Connection) -> None:
    """The body of the process. ``orders`` are ("start", (run, ramp_s)), ("change", run), ("counts",
    None) and ("stop", None).
    """
    gc.disable()  # a full collection of a hundred thousand ranks would make all heartbeats late
    asyncio.run(_run_pool(port, hosts, run, ramp_s, orders))
