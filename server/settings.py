"""The settings of ``hangwatch-server``, as one model. Flags, ``--help`` and messages for invalid
settings are derived from it; environment variables and ``hangwatch.toml`` are read by the model itself.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, Field, FiniteFloat, SecretStr
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from hangwatch import __version__
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ownership import check_ownership

from .alerting import channels
from .recovery import policy

CONFIG_FILE_NAME = "hangwatch.toml"
TEST_ALERT_FLAG = "--test-alert"


class _Metavar(str):
    """The placeholder of a field's value in ``--help``; by default, the field's name."""


def _matching(pattern: str, problem: str) -> AfterValidator:
    """Rejects a text that does not match the pattern; ``problem`` is the message."""

    def check(value: str | SecretStr | None) -> str | SecretStr | None:
        text = reveal_secret(value) if isinstance(value, SecretStr) else value
        if text is not None and not re.fullmatch(pattern, text):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


Seconds = Annotated[FiniteFloat, _Metavar("SECONDS")]
Number = Annotated[int, _Metavar("N")]
OptionalFile = Annotated[
    Path | None, AfterValidator(lambda path: path and path.expanduser()), _Metavar("FILE")
]
_WITHOUT_TRAILING_SLASH = AfterValidator(lambda text: text and text.rstrip("/"))


class Settings(BaseSettings):
    """All settings. Precedence: flag, environment, ``hangwatch.toml`` in the working directory,
    default. The text below a field is its description in ``--help``.
    """

    model_config = SettingsConfigDict(
        env_prefix="HANGWATCH_",
        env_ignore_empty=True,
        toml_file=CONFIG_FILE_NAME,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    host: Annotated[
        str, _matching(r".+", "should be an address of this machine, such as 0.0.0.0")
    ] = "127.0.0.1"
    """address to listen on; 0.0.0.0 for every interface"""
    port: Number = Field(8642, ge=0, le=65535)
    """port to listen on; 0 takes a free one"""
    data_dir: Annotated[Path, AfterValidator(Path.expanduser), _Metavar("DIR")] = Field(
        default_factory=lambda: Path(
            os.environ.get("XDG_STATE_HOME") or "~/.local/state", "hangwatch"
        )
    )
    """folder in which incidents are kept (default: $XDG_STATE_HOME/hangwatch)"""
    database: Annotated[
        SecretStr | None,
        _matching(
            r"(?s)postgres(ql)?://[^/]*/[^/].*",
            "should look like postgresql://USER:PASSWORD@HOST/NAME",
        ),
        _Metavar("URL"),
    ] = None
    """database for incidents in place of that folder: postgresql://USER:PASSWORD@HOST/NAME; several
    servers may share it
    """
    name: Annotated[str, _matching(r".+", "should not be empty")] = Field(
        default_factory=socket.gethostname
    )
    """name of this server in a database that several servers share (default: the host's name)"""
    retention_days: Annotated[FiniteFloat, _Metavar("DAYS")] = Field(90.0, gt=0)
    """days after which an incident is deleted"""
    retention_mb: Annotated[FiniteFloat, _Metavar("MB")] = Field(1024.0, gt=0)
    """megabytes of incidents to keep; beyond it the oldest are deleted"""
    memory_mb: Annotated[FiniteFloat | None, _Metavar("MB")] = Field(None, gt=0)
    """megabytes of memory to use; else three quarters of what its control group or the machine has, at most 4096"""
    token: Annotated[
        SecretStr | None,
        _matching(r"[!-~]+", "should be one or more printable ASCII characters without spaces"),
    ] = None
    """secret that agents and users must present; generated at startup if the host is not loopback"""
    tls_cert: OptionalFile = None
    """certificate chain (PEM), to serve https"""
    tls_key: OptionalFile = None
    """its private key (PEM); may be omitted if the chain's file contains it"""
    public_url: Annotated[
        str | None,
        _matching(
            r"https?://[^/\s?#]+(/[^\s?#]*)?", "should look like https://watch.example/hangwatch"
        ),
        _WITHOUT_TRAILING_SLASH,
        _Metavar("URL"),
    ] = None
    """address at which users reach this server, for links in alerts, if that of a reverse proxy
    differs from this host's
    """
    root_path: Annotated[
        str, _matching(r"(/[\w.~-]+)*/?", "should look like /hangwatch"), _WITHOUT_TRAILING_SLASH
    ] = ""
    """path prefix under which a reverse proxy serves it (default: that of --public-url)"""
    stall_after: Seconds = Field(60.0, gt=0)
    """seconds after which a wait becomes an incident"""
    slow_limit: Seconds = Field(360.0, gt=0)
    """seconds after which a slow rank becomes an alert"""
    startup_after: Seconds = Field(300.0, gt=0)
    """seconds after which a wait for ranks that have not started, or for a communicator that is
    being made, becomes an alert; before, from --stall-after on, it is a warning
    """
    alert: Annotated[tuple[str, ...], NoDecode, _Metavar("URL")] = ()
    """receiver of alerts: a webhook's URL, or one of apprise's for Slack, Teams, PagerDuty, mailto://
    and a hundred others; may be given several times
    """
    alert_secret: Annotated[
        SecretStr | None, _matching(r"(?s).{16,}", "should have 16 characters or more")
    ] = None
    """secret with which webhooks are signed, so that a receiver can verify their origin"""
    alert_command: str | None = None
    """command to run for each alert, without a shell; receives it as JSON on stdin"""
    repeat_interval: Seconds = Field(14400.0, ge=0)
    """seconds after which an alert is repeated while the job still hangs; 0 for never"""
    on_hang: Annotated[Literal["report", "abort"], _Metavar("{report,abort}")] = "report"
    """abort: end an alert's culprits (all ranks, if no culprit is named or left), so that the
    launcher restarts them
    """
    abort_kinds: Annotated[tuple[VerdictKind, ...], NoDecode, _Metavar("KINDS")] = (
        policy.DEFAULT_KINDS
    )
    """kinds of alert for which --on-hang abort ends ranks, separated by commas"""
    abort_after: Seconds = Field(30.0, ge=0)
    """seconds for which such an alert is open, without any progress, before ranks are ended"""
    abort_limit: Number = Field(3, ge=1)
    """incidents of one job for which ranks are ended, until an attempt of it succeeds"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    def make_alert_channels(self) -> list[channels.AlertChannel]:
        """The alert channels that the settings name."""
        secret = reveal_secret(self.alert_secret)
        made = [channels.make_channel(url, secret) for url in self.alert]
        if self.alert_command is not None:
            made.append(channels.CommandChannel(address=self.alert_command))
        return made

    @pydantic.field_validator("alert", mode="before")
    @classmethod
    def _split_alert_urls(cls, value: Any) -> Any:
        if isinstance(value, str):  # a comma may be part of a URL: split only before another URL
            value = [part for part in re.split(r"\s+|,\s*(?=\w+://)", value) if part]
        for url in value if isinstance(value, (list, tuple)) else ():
            channels.make_channel(str(url))  # raises ValueError for one that is invalid
        return value

    @pydantic.field_validator("abort_kinds", mode="before")
    @classmethod
    def _parse_abort_kinds(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = re.split(r"[\s,]+", value.strip(" ,"))
        if not isinstance(value, (list, tuple)):
            return value  # the type validation that follows rejects it
        names = [str(getattr(kind, "value", kind)) for kind in value]
        unknown = [name for name in names if name not in policy.POSSIBLE_KINDS]
        if unknown:
            possible = ", ".join(sorted(policy.POSSIBLE_KINDS))
            raise ValueError(f"cannot contain {', '.join(unknown)}; possible kinds: {possible}")
        return names

    @pydantic.field_validator("alert_command")
    @classmethod
    def _check_alert_command(cls, value: str | None) -> str | None:
        if value is not None:
            channels.resolve_command(value)
        return value

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> Settings:
        if "slow_limit" in self.model_fields_set and self.slow_limit < self.stall_after:
            raise ValueError(
                f"--slow-limit ({self.slow_limit:g}) should not be less than --stall-after"
                f" ({self.stall_after:g})"
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("--tls-key has no effect without --tls-cert")
        return self

    @property
    def path_prefix(self) -> str:
        """The path prefix without a trailing slash; empty at the root of a host."""
        return self.root_path or urlsplit(self.public_url or "").path

    @property
    def abort_rules(self) -> policy.Rules | None:
        """The rules for ending hung ranks; None if ranks are never ended."""
        if self.on_hang == "report":
            return None
        return policy.Rules(
            kinds=frozenset(self.abort_kinds), limit=self.abort_limit, after=self.abort_after
        )

    @property
    def diagnosis_limits(self) -> Limits:
        return Limits(
            stall_after_s=self.stall_after,
            slow_limit_s=max(self.slow_limit, self.stall_after),
            startup_after_s=max(self.startup_after, self.stall_after),
        )


def reveal_secret(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


class SettingsError(Exception):
    """A setting that cannot be used. The message names it and the remedy."""


def load_settings(argv: Sequence[str]) -> Settings:
    """Returns the settings for a command line. Raises SettingsError for an invalid value, and
    SystemExit after ``--help`` and for an unknown flag.
    """
    flag_values = vars(build_parser().parse_args(argv))
    flag_values.pop("test_alert")
    config_file = Path(CONFIG_FILE_NAME)
    try:
        # The file can name commands, so other users must not be able to change it.
        if config_file.is_file():
            check_ownership(config_file)
    except PermissionError as error:
        raise SettingsError(
            f"{CONFIG_FILE_NAME} is not read, and the server not started: {error}; start it in a"
            " folder that only you can write"
        ) from None
    try:
        return Settings(**flag_values)
    except pydantic.ValidationError as error:
        explanations = []
        for problem in error.errors(include_input=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            text = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
            if name in Settings.model_fields:
                places = f"{format_flag(name)} (or HANGWATCH_{name.upper()}, or {name} in {CONFIG_FILE_NAME})"
                text = f"{places} {text}"
            elif problem["loc"]:
                names = ", ".join(Settings.model_fields)
                text = (
                    f"{CONFIG_FILE_NAME} has an unknown setting {name!r}; known settings: {names}"
                )
            explanations.append(text)
        raise SettingsError("\n".join(explanations)) from None
    except ValueError as error:  # TOMLDecodeError, whose module came with Python 3.11
        raise SettingsError(f"{CONFIG_FILE_NAME} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"{CONFIG_FILE_NAME} cannot be read: {error.strerror}; make it readable or move it away"
        ) from None


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser: one flag for each field of the model."""
    parser = argparse.ArgumentParser(
        prog="hangwatch-server",
        allow_abbrev=False,
        description="The central server: collects the reports of all ranks, and names the cause of a hang.",
        epilog=(
            "Each setting is also an environment variable (HANGWATCH_PORT) and a key of"
            f" {CONFIG_FILE_NAME} in the working directory (port = 8642). A flag overrides the environment, the"
            " environment overrides the file."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    parser.add_argument(
        TEST_ALERT_FLAG,
        action="store_true",
        help="send a test message to every alert channel, print the results, and exit",
    )
    for name, field in Settings.model_fields.items():
        help_text = " ".join((field.description or "").split())
        default = field.default
        if isinstance(default, (int, float)):
            default = f"{default:g}"
        elif isinstance(default, tuple):
            default = ",".join(part.value for part in default)
        if default and field.default_factory is None:  # otherwise the description has it
            help_text += f" (default: {default})"
        help_text += f" [HANGWATCH_{name.upper()}]"
        metavars = [entry for entry in field.metadata if isinstance(entry, _Metavar)]
        parser.add_argument(
            format_flag(name),
            metavar=metavars[0] if metavars else name.upper(),
            action="append" if name == "alert" else "store",
            default=argparse.SUPPRESS,
            help=help_text.replace("%", "%%"),
        )
    return parser


def format_flag(name: str) -> str:
    """
    >>> format_flag("stall_after")
    '--stall-after'
    """
    return "--" + name.replace("_", "-")
