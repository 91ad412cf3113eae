"""From the diagnosis' types to those of the API: calls, processes and stacks of an incident. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from hangwatch.model import calls as model_calls
from hangwatch.model import groups, threads, verdicts
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process, StackSample

from ..core import schema

MAX_THREADS_SHOWN = 16  # of one culprit
RECORDER_THREAD_NAME = "hangwatch"  # our own in the training process: no part of the job
MAX_DETAILED_CULPRITS = 8  # more culprits than this show their main threads only
MAX_PROCESSES_SHOWN = 64
CLOCK_SLACK_S = (
    0.5  # a sample's age was measured on its host: seconds that it may seem to precede the onset
)

DateConverter = Callable[[float], datetime]


def convert_site(location: model_calls.Site | None) -> schema.Site | None:
    return (
        None
        if location is None
        else schema.Site(file=location.file, line=location.line, function=location.function)
    )


def convert_group(source: groups.Group | None) -> schema.GroupName | None:
    return (
        None
        if source is None
        else schema.GroupName(
            name=source.name, desc=source.desc, ranks=list(source.ranks), backend=source.backend
        )
    )


def convert_calls(classes: Iterable[verdicts.CallClass]) -> list[schema.CallClass]:
    return [
        schema.CallClass(
            ranks=list(c.ranks),
            seq=c.call.seq,
            op=c.call.signature.op,
            shapes=[list(shape) for shape in c.call.signature.shapes],
            dtype=c.call.signature.dtype,
            reduce_op=c.call.signature.reduce_op,
            root=c.call.signature.root,
            peer=c.call.peer,
            splits=(
                None
                if c.call.signature.splits is None
                else [list(part) for part in c.call.signature.splits]
            ),
            detail=c.call.signature.detail,
            site=convert_site(c.call.site),
        )
        for c in classes
    ]


def convert_divergence(source: verdicts.Divergence | None) -> schema.Divergence | None:
    if source is None:
        return None
    return schema.Divergence(
        group=schema.GroupName(
            name=source.group.name,
            desc=source.group.desc,
            ranks=list(source.group.ranks),
            backend=source.group.backend,
        ),
        since_seq=source.since_seq,
        note=source.note,
        sides=[schema.Side(ranks=list(ranks)) for ranks in source.sides],
        rows=[
            schema.AlignedRow(
                seq=[None if c is None else c.seq for c in row.calls],
                calls=[None if c is None else _convert_aligned_call(c) for c in row.calls],
                omitted=row.omitted,
            )
            for row in source.rows
        ],
    )


def _convert_aligned_call(call: model_calls.Call) -> schema.AlignedCall:
    signature = call.signature
    return schema.AlignedCall(
        op=signature.op,
        shapes=[list(shape) for shape in signature.shapes],
        dtype=signature.dtype,
        reduce_op=signature.reduce_op,
        root=signature.root,
        detail=signature.detail,
        raised=call.raised,
        site=convert_site(call.site),
    )


def convert_waits(source: Iterable[verdicts.Wait]) -> list[schema.Wait]:
    return [
        schema.Wait.model_validate(
            {"rank": w.rank, "for": w.on_rank, "group": w.group, "seq": w.seq}
        )
        for w in source
    ]


def convert_processes(attempt: Attempt, culprits: Iterable[int]) -> list[schema.Process]:
    """The culprits' processes, and those that failed."""
    shown = dict.fromkeys(culprits)
    dead = sorted(
        r
        for r, p in attempt.processes.items()
        if p.exit is not None and p.exit.has_failed and r not in shown
    )
    found = ((rank, attempt.processes.get(rank)) for rank in [*shown, *dead][:MAX_PROCESSES_SHOWN])
    return [convert_process(held) for _, held in found if held is not None]


def convert_process(source: Process) -> schema.Process:
    raised = source.exception
    return schema.Process(
        rank=source.rank,
        host=source.host,
        pid=source.identity.pid,
        state=source.state,
        exit_status=source.exit.exit_status if source.exit else None,
        signal=source.exit.signal if source.exit else None,
        exception=(
            None
            if raised is None
            else schema.Exception_(
                type=raised.type, message=raised.message, site=convert_site(raised.site)
            )
        ),
    )


def convert_stack(
    ranks: Sequence[int],
    sample: StackSample,
    thread: threads.ThreadStack | None,
    date: DateConverter,
) -> schema.Stack:
    """One thread of a sample, or its error where there is no thread."""
    return schema.Stack(
        ranks=list(ranks),
        thread=thread.thread if thread else None,
        source=sample.source,
        taken_at=date(sample.taken_at),
        frames=(
            [
                schema.Frame(function=f.function, file=f.file, line=f.line, text=f.text)
                for f in thread.frames
            ]
            if thread
            else []
        ),
        native=sample.native,
        error=sample.error if thread is None else thread.error,
    )


def find_newest_sample(process: Process | None, since: float) -> StackSample | None:
    """The newest sample taken since then: one with stacks, else the newest failure."""
    recent = [s for s in process.samples if s.taken_at >= since - CLOCK_SLACK_S] if process else []
    return next((s for s in reversed(recent) if s.threads), recent[-1] if recent else None)


def collect_stacks(
    attempt: Attempt,
    culprits: Sequence[int],
    waiting: Sequence[int],
    since: float,
    date: DateConverter,
) -> list[schema.Stack]:
    """The culprits' stacks, then those of the ranks that wait, merged where equal."""
    merged = merge_main_stacks(attempt, culprits, since, date)
    if len(culprits) <= MAX_DETAILED_CULPRITS:
        for rank in culprits:
            sample = find_newest_sample(attempt.processes.get(rank), since)
            others = (
                [
                    t
                    for t in sample.threads
                    if t is not sample.main_thread and t.thread != RECORDER_THREAD_NAME
                ]
                if sample
                else []
            )
            # The children that it waits for, before its own other threads; of these first the one
            # that may keep all others from running.
            others.sort(key=lambda t: (t.pid is None, not t.holds_gil))
            merged += [
                convert_stack([rank], sample, t, date) for t in others[:MAX_THREADS_SHOWN] if sample
            ]
    accused = set(culprits)
    return merged + merge_main_stacks(
        attempt, [r for r in waiting if r not in accused], since, date
    )


def merge_main_stacks(
    attempt: Attempt, ranks: Iterable[int], since: float, date: DateConverter
) -> list[schema.Stack]:
    """Main threads, one entry for all ranks that stand in the same place; the most frequent first."""
    classes: dict[object, tuple[list[int], StackSample]] = {}
    for rank in ranks:
        held = attempt.processes.get(rank)
        if (
            held is not None
            and held.samples
            and (sample := find_newest_sample(held, since)) is not None
        ):
            main = sample.main_thread
            merge_key = (sample.source, sample.error, main and (main.thread, main.frames))
            classes.setdefault(merge_key, ([], sample))[0].append(rank)
    ordered = sorted(classes.values(), key=lambda found: -len(found[0]))
    return [convert_stack(members, sample, sample.main_thread, date) for members, sample in ordered]


def keep_known_stacks(
    before: Iterable[schema.Stack], now: list[schema.Stack]
) -> list[schema.Stack]:
    """`now`, but what was known of ranks that can no longer be asked stays; so does what differs
    only in its date.
    """
    covered = {rank for entry in now if entry.error is None for rank in entry.ranks}
    before = list(before)
    lost = [e for e in before if e.error is None and not covered.intersection(e.ranks)]
    replaced = {rank for entry in lost for rank in entry.ranks}
    dated = {_dump_without_date(entry): entry for entry in before}
    return lost + [
        dated.get(_dump_without_date(e), e)
        for e in now
        if e.error is None or not replaced.issuperset(e.ranks)
    ]


def _dump_without_date(entry: schema.Stack) -> str:
    return entry.model_dump_json(exclude={"taken_at"})
