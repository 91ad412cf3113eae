"""The node agents that report to this server, and which of them have gone silent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, ValuesView
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat

SILENT_AFTER_S = 60.0  # an agent without a heartbeat for so long no longer counts towards the load


@dataclass(slots=True, kw_only=True)
class Agent:
    host: str
    last_seen_at: float
    cost: heartbeat.AgentCost | None = None  # the last one reported


@dataclass(slots=True)
class AgentRegistry:
    """Node agents by id, ordered by their last heartbeat. Times are the monotonic clock's."""

    _agents: OrderedDict[str, Agent] = field(default_factory=OrderedDict)
    _silent_count: int = 0

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._agents

    def items(self) -> ItemsView[str, Agent]:
        return self._agents.items()

    def values(self) -> ValuesView[Agent]:
        return self._agents.values()

    @property
    def reporting_count(self) -> int:
        """The number of agents that are not silent."""
        return len(self._agents) - self._silent_count

    def record_heartbeat(self, beat: heartbeat.Heartbeat, now: float) -> float:
        """Records that an agent reported. Returns the CPU seconds it used since its last report."""
        agent = self._agents.get(beat.agent)
        previous_cost = None if agent is None else agent.cost
        if agent is None:
            self._agents[beat.agent] = Agent(host=beat.host, last_seen_at=now, cost=beat.cost)
        else:
            agent.last_seen_at = now
            agent.cost = beat.cost or previous_cost
            self._agents.move_to_end(beat.agent)
        if beat.cost is None:
            return 0.0
        previous_cpu_s = 0.0 if previous_cost is None else previous_cost.cpu_s
        return max(0.0, beat.cost.cpu_s - previous_cpu_s)

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
        """Drops an agent that `update_silent` returned."""
        del self._agents[agent_id]
        self._silent_count -= 1
