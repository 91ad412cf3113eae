"""While `is_quiet` says that an attempt needs no diagnosis, the full diagnosis finds nothing either,
in any job with any fault. `ModelCluster.run_diagnosis` asserts it at every step.
"""

from __future__ import annotations

from hypothesis import given, note
from hypothesis import strategies as st

from hangwatch.diagnosis import is_quiet
from tests.simulation.model_cluster import HeartbeatDelivery, ModelCluster
from tests.simulation.model_job import (
    FOREVER_S,
    EndProcess,
    EnterCall,
    Instruction,
    RunOwnCode,
    StopProcess,
    make_signature,
)

from .test_properties import (
    LIMITS,
    JobPlan,
    draw_networks,
    draw_plans,
    example_settings,
    terse_update_periods,
)

FAULT_INSTRUCTIONS: dict[str, list[Instruction]] = {
    "stuck": [RunOwnCode(FOREVER_S, stuck=True)],
    "stopped": [StopProcess()],
    "killed": [EndProcess(signal=9)],
    "exits": [EndProcess(status=0)],
    "skips": [],
}


def plant_fault(
    plan: JobPlan, rank: int, at: int, fault: str
) -> dict[int, list[list[Instruction]]]:
    """Each rank's program, with one part of one rank's program replaced by a fault."""
    parts = {r: plan.program_parts(r) for r in range(plan.size)}
    mine = parts[rank % plan.size]
    part = 1 + at % (len(mine) - 2)
    if fault == "another call":
        mine[part] = [
            (
                EnterCall(
                    i.stream,
                    make_signature("barrier" if i.signature.op != "barrier" else "all_reduce"),
                    i.event,
                    i.blocking,
                    i.free,
                )
                if isinstance(i, EnterCall)
                else i
            )
            for i in mine[part]
        ]
    else:
        mine[part] = FAULT_INSTRUCTIONS[fault]
    return parts


@example_settings(40)
@given(
    draw_plans(),
    draw_networks(),
    st.integers(0, 7),
    st.integers(0, 13),
    st.sampled_from((*FAULT_INSTRUCTIONS, "another call")),
    terse_update_periods,
)
def test_quick_diagnosis_agrees_with_full_one(
    plan: JobPlan,
    fates: dict[tuple[str, int], HeartbeatDelivery],
    rank: int,
    at: int,
    fault: str,
    details_s: float | None,
) -> None:
    note(f"{plan}\n{fates}\n{fault} of rank {rank} at {at}\n{details_s}")
    world = ModelCluster(
        plan.build_job(plant_fault(plan, rank, at, fault)), LIMITS, fates, details_s=details_s
    )
    kinds, looked = set(), 0
    while world.job.now < 30.0:
        world.run_step()
        kinds |= {v.kind for v in world.run_diagnosis().verdicts if v.is_confirmed}
        attempt = world.fleet.latest_attempt("job")
        looked += attempt is not None and is_quiet(attempt, world.now, LIMITS)
    note(f"{kinds}, quiet at {looked} looks")
