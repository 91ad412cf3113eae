"""Flags, environment and file feed one model; what is wrong is named, with the remedy, and never
the token.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.model.kinds import VerdictKind
from hangwatch.server.main import StartError, kept_token
from hangwatch.server.recovery.policy import Rules
from hangwatch.server.settings import (
    Settings,
    SettingsError,
    build_parser,
    format_flag,
    load_settings,
)


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HANGWATCH_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def test_flag_wins_over_environment_over_file_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings([]).port == 8642
    Path("hangwatch.toml").write_text("port = 1001\nstall_after = 7\n")
    assert load_settings([]).port == 1001
    monkeypatch.setenv("HANGWATCH_PORT", "1002")
    assert load_settings([]).port == 1002
    assert load_settings(["--port", "1003"]).port == 1003
    assert load_settings([]).diagnosis_limits.stall_after_s == 7.0


def test_alert_urls_come_from_repeated_flags_or_one_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_settings(["--alert", "http://a/1", "--alert", "https://b/2"]).alert == (
        "http://a/1",
        "https://b/2",
    )
    monkeypatch.setenv("HANGWATCH_ALERT", "http://a/1, http://b/2 http://c/3")
    assert load_settings([]).alert == ("http://a/1", "http://b/2", "http://c/3")


def test_a_comma_may_be_part_of_an_alert_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGWATCH_ALERT", "mailtos://u:p@mail.example?to=a@b.c,d@e.f,http://h/x")
    assert load_settings([]).alert == ("mailtos://u:p@mail.example?to=a@b.c,d@e.f", "http://h/x")


def test_path_prefix_is_given_or_from_public_url() -> None:
    assert load_settings([]).path_prefix == ""
    assert (
        load_settings(["--public-url", "https://watch.example/hangwatch/"]).path_prefix
        == "/hangwatch"
    )
    assert (
        load_settings(["--public-url", "https://watch.example/x", "--root-path", "/y/"]).path_prefix
        == "/y"
    )


def test_data_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load_settings([]).data_dir == Path("/state/hangwatch")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/u")
    assert load_settings([]).data_dir == Path("/home/u/.local/state/hangwatch")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "x"], "--port"),
        (["--port", "70000"], "--port"),
        (["--stall-after", "0"], "--stall-after"),
        (["--stall-after", "nan"], "--stall-after"),
        (["--alert", "ftp://x"], "--alert.* ftp://"),
        (["--alert", "slack://x"], "--alert"),
        (["--alert", "x"], "--alert"),
        (["--alert-command", "nosuchprogram x"], "--alert-command.*'nosuchprogram'"),
        (["--database", "mysql://x/y"], "--database.*postgresql://"),
        (["--public-url", "watch.example"], "--public-url"),
        (["--root-path", "x"], "--root-path"),
        (["--host", ""], "--host.*address of this machine"),
        (["--alert-secret", "short"], "--alert-secret.*16 characters or more"),
        (["--tls-key", "x"], "--tls-cert"),
        (["--retention-days", "0"], "--retention-days"),
        (["--slow-limit", "5", "--stall-after", "10"], "--slow-limit"),
        (["--on-hang", "kill"], "--on-hang.*'report' or 'abort'"),
        (
            ["--abort-kinds", "deadlock,slow_rank"],
            "--abort-kinds.*cannot contain slow_rank; possible kinds: .*missing_rank",
        ),
        (["--abort-after", "-1"], "--abort-after"),
        (["--abort-limit", "0"], "--abort-limit"),
    ],
)
def test_a_bad_value_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(argv)


def test_a_bad_token_is_not_printed() -> None:
    with pytest.raises(SettingsError, match="--token") as error:
        load_settings(["--token", "hush hush"])
    assert "hush" not in str(error.value)


def test_a_typo_in_the_file_is_named() -> None:
    Path("hangwatch.toml").write_text("prot = 1\n")
    with pytest.raises(SettingsError, match=r"'prot'.*known settings: .*port"):
        load_settings([])
    Path("hangwatch.toml").write_text("port = = 1\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings([])


def test_long_stall_after_raises_default_limits() -> None:
    limits = load_settings(["--stall-after", "600"]).diagnosis_limits
    assert (limits.slow_limit_s, limits.startup_after_s) == (600.0, 600.0)
    assert load_settings(["--startup-after", "900"]).diagnosis_limits.startup_after_s == 900.0


def test_ranks_are_ended_only_if_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings([]).abort_rules is None
    assert load_settings(["--on-hang", "abort"]).abort_rules == Rules()
    monkeypatch.setenv("HANGWATCH_ON_HANG", "abort")
    monkeypatch.setenv("HANGWATCH_ABORT_KINDS", "deadlock, frozen_rank")
    expected = Rules(
        kinds=frozenset({VerdictKind.DEADLOCK, VerdictKind.FROZEN_RANK}), limit=1, after=0.0
    )
    assert load_settings(["--abort-after", "0", "--abort-limit", "1"]).abort_rules == expected


def test_help_covers_every_setting() -> None:
    help_text = build_parser().format_help()
    for name, field in Settings.model_fields.items():
        assert format_flag(name) in help_text
        assert f"HANGWATCH_{name.upper()}" in help_text
        assert field.description


def test_generated_token_is_kept_and_private(tmp_path: Path) -> None:
    made = kept_token(tmp_path)
    assert kept_token(tmp_path) == made
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["token", "."])
def test_token_that_others_can_change_or_read_is_not_used(name: str, tmp_path: Path) -> None:
    """SECURITY.md: "nor with a token of its own that others could have read or changed"."""
    kept_token(tmp_path)
    (tmp_path / name).chmod(0o777 if name == "." else 0o640)
    with pytest.raises(StartError, match=r"(written|read) by other users .*--token"):
        kept_token(tmp_path)
