"""The node agents that report, each with its processes, and which of them have gone silent.

Times are the server's monotonic clock's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ValuesView
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat
from hangwatch.protocol.heartbeat import MAX_CLOCK_DRIFT

from .updates import TrackedProcess

SILENT_AFTER_S = 60.0  # an agent without a heartbeat for so long no longer counts towards the load
# Node agents give a heartbeat up much earlier, so a larger gap is a jump of the agent's clock.
MAX_DELAY_S = 120.0


@dataclass(slots=True)
class ReportingAgent:
    """A node agent with the processes that it reports."""

    last_seen_at: float = 0.0
    last_number: int = 0  # the number of its last heartbeat
    cost: heartbeat.AgentCost | None = None  # the last one reported
    processes: dict[tuple[str, str], TrackedProcess] = field(
        default_factory=dict
    )  # keys: locations
    # The smallest difference seen between the time of receipt and the agent's clock, and when.
    _smallest_gap: tuple[float, float] | None = None

    def estimate_sent_at(self, beat: heartbeat.Heartbeat, received_at: float) -> float:
        """When a heartbeat was sent, on the server's clock.

        The agent's fastest heartbeat so far is taken to have had no delay; any larger gap between
        the clocks, beyond their possible drift, is the delay of this one. After a jump of the agent's
        clock, as when its machine was suspended, this starts again.
        """
        if beat.sent_s is None:
            return received_at
        gap = received_at - beat.sent_s
        smallest, updated_at = self._smallest_gap or (gap, received_at)
        if abs(gap - smallest) > MAX_DELAY_S:
            smallest = gap
        smallest = min(gap, smallest + MAX_CLOCK_DRIFT * (received_at - updated_at))
        self._smallest_gap = smallest, received_at
        return beat.sent_s + smallest


@dataclass(slots=True)
class AgentRegistry:
    """Node agents by id, ordered by their last heartbeat."""

    cpu_s: float = 0.0  # that all agents have used, also those that have left
    _agents: OrderedDict[str, ReportingAgent] = field(default_factory=OrderedDict)
    _silent_count: int = 0

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._agents

    def get(self, agent_id: str) -> ReportingAgent | None:
        return self._agents.get(agent_id)

    def values(self) -> ValuesView[ReportingAgent]:
        return self._agents.values()

    @property
    def reporting_count(self) -> int:
        """The number of agents that are not silent."""
        return len(self._agents) - self._silent_count

    def record_heartbeat(self, beat: heartbeat.Heartbeat, now: float) -> ReportingAgent:
        """Records that an agent reported, and returns it."""
        agent = self._agents.get(beat.agent)
        if agent is None:
            agent = self._agents[beat.agent] = ReportingAgent()
        else:
            self._agents.move_to_end(beat.agent)
        agent.last_seen_at = now
        if beat.cost is not None:
            self.cpu_s += max(0.0, beat.cost.cpu_s - (agent.cost.cpu_s if agent.cost else 0.0))
            agent.cost = beat.cost
        return agent

    def update_silent(self, now: float) -> list[tuple[str, float]]:
        """Counts the silent agents. Returns their ids and for how many seconds they are silent."""
        silent: list[tuple[str, float]] = []
        for agent_id, agent in self._agents.items():
            silent_s = now - agent.last_seen_at
            if silent_s <= SILENT_AFTER_S:
                break  # all further agents reported later
            silent.append((agent_id, silent_s))
        self._silent_count = len(silent)
        return silent

    def forget_silent(self, agent_id: str) -> None:
        """Drops an agent that `update_silent` returned, but not its processes."""
        del self._agents[agent_id]
        self._silent_count -= 1
