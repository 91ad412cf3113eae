"""Recordings on request: profiles sampled by node agents, and the API's documents about them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field, model_validator

from hangwatch.protocol import commands
from hangwatch.stacks.profile import Profile, unpack_profile
from hangwatch.stacks.trees import FunctionTime, build_call_tree, find_hottest_functions
from hangwatch.tracking.attempt import Attempt

from ..core.schema import ApiModel, AsDocument
from .requests import RankReply, RankRequest, RequestRegistry

START_TIMEOUT_S = 30.0  # a node agent of a large job reports every 20 s, and begins after that
# The time allowed for one rank beyond the recorded time; a node records one rank after the other.
OVERHEAD_S = 25.0
NATIVE_OVERHEAD_S = 60.0
MAX_KEPT_BYTES = 64 << 20  # all kept profiles together
MAX_RECORDED_RANKS = 64  # ranks of one recording
_TIMEOUT_ERROR = (
    "its node agent did not {} in time: check that the hangwatch agent runs on its host"
)

RecordingStatus = Literal["waiting", "recording", "done", "failed"]  # one rank's


@dataclass(slots=True, kw_only=True)
class RankRecording(RankReply):
    status: str = "waiting"  # a `RecordingStatus`
    reply: commands.RecordingReply | None = None
    # These are made of the profile when they are first requested, since that takes a while.
    is_unpacked: bool = False
    note: str = ""
    seconds: float = 0.0
    threads: list[ThreadTime] = field(default_factory=list)
    idle_threads: int = 0

    @property
    def profile(self) -> str:
        """The packed profile; empty if there is none."""
        return "" if self.reply is None else self.reply.profile

    def unpack(self, reply: commands.RecordingReply) -> None:
        """Fills in what the reply's profile shows, or why it cannot be read."""
        try:
            profile = unpack_profile(reply.profile)
        except ValueError as error:
            self.status = "failed"
            self.error = (
                f"its node agent's reply is not understood ({error}): install the same release of"
                " hangwatch on both sides"
            )
            return
        self.seconds = reply.seconds
        self.note = reply.note
        if not reply.note and profile.dropped_samples:
            self.note = f"{profile.dropped_samples} samples of rare stacks were dropped"
        threads = []
        for thread in profile.shown_threads:
            hottest = [
                HotFunction(
                    function=frame.function, file=frame.file, line=frame.line, samples=samples
                )
                for frame, samples in find_hottest_functions(thread.stacks)
            ]
            thread_time = ThreadTime(
                thread=thread.thread,
                main=thread.is_main,
                samples=thread.sample_count,
                hottest=hottest,
                tree=list(build_call_tree(thread.stacks)),
            )
            threads.append(thread_time)
        self.threads = threads  # replaced as a whole, since another thread may do the same
        self.idle_threads = len(profile.threads) - len(profile.shown_threads)
        self.is_unpacked = True


@dataclass(slots=True, kw_only=True, eq=False)
class RequestedRecording(RankRequest[RankRecording]):
    seconds: int
    rate: int
    native: bool
    gil: bool

    @property
    def profile_bytes(self) -> int:
        """0 without a profile."""
        return sum(len(rank.profile) for rank in self.ranks)

    @property
    def max_duration_s(self) -> float:
        """The longest time that the recording of one rank may take."""
        return self.seconds + (NATIVE_OVERHEAD_S if self.native else OVERHEAD_S)


class RecordingRegistry(RequestRegistry[RequestedRecording]):
    NAME = "recording"
    KIND = commands.CommandKind.RECORD
    MAX_KEPT = 20

    def is_full(self) -> bool:
        kept_bytes = sum(recording.profile_bytes for recording in self.requests.values())
        return super().is_full() or kept_bytes > MAX_KEPT_BYTES

    def find_conflict(self, attempt: Attempt, ranks: Sequence[int], now: float) -> str | None:
        """The active recording on a host of these ranks: a host records one process at a time."""
        agents = {attempt.processes[rank].agent for rank in ranks}
        for recording in self.requests.values():
            recording.expire_replies(now)
            if any(rank.is_active and rank.agent in agents for rank in recording.ranks):
                return recording.id
        return None

    def request_recording(
        self, attempt: Attempt, request: RecordingRequest, now: float
    ) -> RequestedRecording:
        """Records ``request.ranks``, each of which must be in ``attempt.processes``."""
        options = request.model_dump(exclude={"job", "ranks"})
        recording = RequestedRecording(**self.identify_request(attempt, now), **options)
        running_per_agent: Counter[str] = Counter()
        for rank in dict.fromkeys(request.ranks):
            process = attempt.processes[rank]
            running_per_agent[process.agent] += process.exit is None
            longest_s = running_per_agent[process.agent] * recording.max_duration_s
            reply = RankRecording(
                rank=rank,
                deadline=now + START_TIMEOUT_S + longest_s,
                timeout_error=_TIMEOUT_ERROR.format("begin"),
            )
            self.add_rank(recording, reply, process, now, **options)
        self.keep_request(recording)
        return recording

    def stop_recording(self, recording: RequestedRecording, attempt: Attempt, now: float) -> None:
        """Ends the recording of all ranks; what was sampled so far is kept."""
        for recorded in recording.ranks:
            process = attempt.processes.get(recorded.rank)
            if not recorded.is_active or process is None:
                continue
            self.command_queue.queue_command(process, self.KIND, now, stops=recorded.command_id)
            recorded.deadline = min(recorded.deadline, now + START_TIMEOUT_S)

    def apply_replies(self, replies: Sequence[commands.RecordingReply], now: float) -> None:
        """Applies the replies of a heartbeat. A repeated reply is ignored."""
        for recording, recorded, reply in self.match_replies(replies):
            if not recorded.is_active:
                continue
            if reply.begun:
                recorded.status = "recording"
                recorded.deadline = now + recording.max_duration_s
                recorded.timeout_error = _TIMEOUT_ERROR.format("end")
            else:
                recorded.reply = reply
                recorded.error = reply.error
                recorded.status = "failed" if reply.error else "done"
        if replies:
            self.drop_oldest()


def describe_recording(recording: RequestedRecording) -> Recording:
    """The document of a recording. Unpacking its profiles takes a while: call this in a thread."""
    for rank in recording.ranks:
        if rank.reply is not None and rank.profile and not rank.is_unpacked:
            rank.unpack(rank.reply)
    return Recording.model_validate(recording, from_attributes=True)


def unpack_profiles(recording: RequestedRecording) -> list[tuple[int, Profile]]:
    """The valid profiles, by rank. `describe_recording` reports the invalid ones."""
    profiles = []
    for rank in recording.ranks:
        if rank.profile:
            with contextlib.suppress(ValueError):
                profiles.append((rank.rank, unpack_profile(rank.profile)))
    return profiles


class RecordingRequest(ApiModel):
    """A request for a recording. ``job`` may be omitted if only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=MAX_RECORDED_RANKS)
    seconds: int = Field(default=10, ge=1, le=commands.MAX_RECORDING_S)
    rate: int = Field(
        default=100, ge=1, le=commands.MAX_RECORDING_HZ, description="samples a second"
    )
    native: bool = Field(
        default=False, description="include C and C++ frames; pauses the process for each sample"
    )
    gil: bool = Field(
        default=False,
        description="sample only threads that hold the GIL, instead of all threads",
    )

    @model_validator(mode="after")
    def _check_sample_count(self) -> RecordingRequest:
        if self.seconds * self.rate > commands.MAX_RECORDING_SAMPLES:
            raise ValueError(
                f"{self.seconds} s at {self.rate} Hz are more than"
                f" {commands.MAX_RECORDING_SAMPLES} samples: reduce either of them"
            )
        return self


class HotFunction(ApiModel):
    function: str
    file: str
    line: int  # the most frequent one
    samples: int


class ThreadTime(ApiModel):
    """One thread: its samples as a tree in which library frames are folded, and the user functions
    with the most samples.
    """

    thread: str
    main: bool
    samples: int
    hottest: list[HotFunction] = Field(default_factory=list)
    tree: list[Annotated[FunctionTime, AsDocument()]] = Field(default_factory=list)


class RecordedRank(ApiModel):
    rank: int
    status: RecordingStatus
    error: str | None = None
    note: str = ""  # the way in which the recording falls short of the request
    seconds: float = 0.0  # the time for which it was sampled
    threads: list[ThreadTime] = Field(default_factory=list)
    idle_threads: int = 0  # other threads, which stayed at one line of a library


class Recording(ApiModel):
    id: str
    job: str
    attempt: int
    seconds: int
    rate: int
    native: bool
    gil: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[RecordedRank]
