"""Of any job, whatever befalls it: where the quick look finds all well, the full diagnosis has
nothing to say either.

`World.diagnose` holds the two against each other at every look.
"""

from __future__ import annotations

from hypothesis import given, note
from hypothesis import strategies as st

from hangwatch.diagnosis import quiet
from tests.unit.model import FOREVER, Ends, Enter, Instruction, Stops, Work, signature
from tests.unit.model_wire import Fate, World

from .test_properties import LIMITS, Plan, jobs, networks, plans, seldom

FAULTS: dict[str, list[Instruction]] = {
    "stuck": [Work(FOREVER, stuck=True)],
    "stopped": [Stops()],
    "killed": [Ends(signal=9)],
    "exits": [Ends(status=0)],
    "skips": [],
}


def planted(plan: Plan, rank: int, at: int, fault: str) -> dict[int, list[list[Instruction]]]:
    """Each rank's program, with one rank's part of one happening replaced by a fault."""
    parts = {r: plan.parts(r) for r in range(plan.size)}
    mine = parts[rank % plan.size]
    part = 1 + at % (len(mine) - 2)
    if fault == "another call":
        mine[part] = [
            Enter(
                i.place,
                signature("barrier" if i.signature.op != "barrier" else "all_reduce"),
                i.event,
                i.blocking,
                i.free,
            )
            if isinstance(i, Enter)
            else i
            for i in mine[part]
        ]
    else:
        mine[part] = FAULTS[fault]
    return parts


@jobs(40)
@given(
    plans(),
    networks(),
    st.integers(0, 7),
    st.integers(0, 13),
    st.sampled_from((*FAULTS, "another call")),
    seldom,
)
def test_where_the_quick_look_finds_all_well_so_does_the_full_one(
    plan: Plan,
    fates: dict[tuple[str, int], Fate],
    rank: int,
    at: int,
    fault: str,
    details_s: float | None,
) -> None:
    note(f"{plan}\n{fates}\n{fault} of rank {rank} at {at}\n{details_s}")
    world = World(plan.job(planted(plan, rank, at, fault)), LIMITS, fates, details_s=details_s)
    kinds, looked = set(), 0
    while world.job.now < 30.0:
        world.step()
        kinds |= {v.kind for v in world.diagnose().verdicts if v.is_confirmed}
        attempt = world.fleet.latest_attempt("job")
        looked += attempt is not None and quiet(attempt)
    note(f"{kinds}, quiet at {looked} looks")
