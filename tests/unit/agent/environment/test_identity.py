"""The rank, the world and the job that a process has by its environment."""

from __future__ import annotations

from hangwatch.agent.environment.identity import parse_environ


def test_environment_of_lightning_launcher() -> None:
    env = {"MASTER_ADDR": "n", "MASTER_PORT": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"}
    assert parse_environ(env | {"LOCAL_RANK": "2"}).rank == 2
    assert parse_environ(env | {"LOCAL_RANK": "0"}).rank is None, "every child of rank 0 has it"
    assert parse_environ(env | {"LOCAL_RANK": "2", "NODE_RANK": "1"}).rank is None
    assert parse_environ(env | {"LOCAL_RANK": "2", "RANK": "6"}).rank == 6
    assert parse_environ({}, "10.0.0.1:23456").job == "10.0.0.1:23456"
    assert parse_environ({"HANGWATCH_JOB": "j"}, "10.0.0.1:23456").job == "j"


def test_numbers_of_the_environment_that_the_server_would_refuse_are_left_out() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "HANGWATCH_JOB": "run\n7" + "x" * 300}
    for restarts in ("9223372036854775808", "²", "٣", "-1", "1e3", "9" * 5000):
        launch = parse_environ(env | {"TORCHELASTIC_RESTART_COUNT": restarts})
        assert (launch.restart, launch.rank, launch.world_size) == (0, 1, 2), restarts
    assert launch.job.startswith("run?7x") and len(launch.job) == 200
    assert parse_environ(env | {"TORCHELASTIC_RESTART_COUNT": "12"}).restart == 12
    assert parse_environ(env | {"RANK": "9223372036854775808"}).rank is None
