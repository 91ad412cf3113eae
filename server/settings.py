"""One settings model feeds the flags, the environment, ``hangwatch.toml`` and ``--help``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from hangwatch import __version__
from hangwatch.types import Limits

TOML = "hangwatch.toml"


class UsageError(Exception):
    """A setting that cannot be used. The message names it and the remedy."""


def default_data_dir() -> Path:
    """``$XDG_STATE_HOME/hangwatch``, by the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hangwatch"


class Settings(BaseSettings):
    """What an operator can set. Precedence: flag, environment, ``hangwatch.toml`` in the working directory, default."""

    model_config = SettingsConfigDict(
        env_prefix="HANGWATCH_", env_ignore_empty=True, toml_file=TOML, extra="forbid", hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8642, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(default_factory=default_data_dir, description="folder in which incidents are kept")
    token: SecretStr | None = Field(
        None, description="secret that agents and people must present; made at the start where the host is not loopback"
    )
    stall_after: float = Field(60.0, gt=0, allow_inf_nan=False, description="seconds after which a wait becomes an incident")
    slow_limit: float = Field(
        360.0, gt=0, allow_inf_nan=False, description="seconds after which a slow rank becomes an alert"
    )
    alert: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="URL to which each alert is posted as JSON; may be given several times"
    )

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

    @field_validator("alert", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [part for part in re.split(r"[,\s]+", value) if part]
        for url in value if isinstance(value, (list, tuple)) else ():
            if not re.match(r"https?://[^/\s]", str(url)):
                raise ValueError("should be URLs that start with http:// or https://")
        return value

    @field_validator("token")
    @classmethod
    def _presentable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[!-~]+", value.get_secret_value()):
            raise ValueError("should be one or more printable ASCII characters without spaces")
        return value

    @field_validator("data_dir")
    @classmethod
    def _home(cls, value: Path) -> Path:
        return value.expanduser()

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if "slow_limit" in self.model_fields_set and self.slow_limit < self.stall_after:
            raise ValueError(f"--slow-limit ({self.slow_limit:g}) should not be less than --stall-after ({self.stall_after:g})")
        return self

    @property
    def limits(self) -> Limits:
        return Limits(stall_after=self.stall_after, slow_limit=max(self.slow_limit, self.stall_after))


def load(argv: Sequence[str]) -> Settings:
    """The settings for a command line. Raises UsageError; leaves by SystemExit after ``--help`` and on a bad flag."""
    given = vars(parser().parse_args(argv))
    try:
        return Settings(**given)
    except ValidationError as error:
        raise UsageError("\n".join(_explain(e["loc"], e["msg"]) for e in error.errors(include_input=False))) from None
    except ValueError as error:  # TOMLDecodeError, whose module came with Python 3.11
        raise UsageError(f"{TOML} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{TOML} cannot be read: {error.strerror}; make it readable or move it away") from None


def parser() -> argparse.ArgumentParser:
    """A flag for each field of the model."""
    made = argparse.ArgumentParser(
        prog="hangwatch-server",
        description="The central server: gathers what the ranks report, and names what hangs.",
        epilog=f"Each setting is also an environment variable (HANGWATCH_PORT) and a key of {TOML} in the working directory "
        "(port = 8642). A flag wins over the environment, the environment over the file.",
    )
    made.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    for name, field in Settings.model_fields.items():
        made.add_argument(
            flag(name),
            metavar=_metavar(name, field),
            action="append" if name == "alert" else "store",
            default=argparse.SUPPRESS,
            help=f"{field.description}{_default(name, field)} [HANGWATCH_{name.upper()}]".replace("%", "%%"),
        )
    return made


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    by_type: dict[object, str] = {int: "N", float: "SECONDS", Path: "DIR"}
    return "URL" if name == "alert" else by_type.get(field.annotation, name.upper())


def _default(name: str, field: FieldInfo) -> str:
    if name == "data_dir":
        return " (default: $XDG_STATE_HOME/hangwatch)"
    if isinstance(field.default, (int, float)):
        return f" (default: {field.default:g})"
    return f" (default: {field.default})" if field.default else ""


def _explain(loc: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Input should", "should")
    if not loc:
        return message
    name = str(loc[0])
    if name not in Settings.model_fields:
        known = ", ".join(Settings.model_fields)
        return f"{TOML} has a key {name!r} that is no setting; known are: {known}"
    return f"{flag(name)} (or HANGWATCH_{name.upper()}, or {name} in {TOML}) {message}"
