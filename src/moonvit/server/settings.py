"""Every setting of the server: a flag of ``moonvit serve``, or the variable ``MOONVIT_`` + its name in capitals.

A flag wins over the variable. What contradicts itself, and a variable that is almost but not quite one of these names,
is refused when the server starts.
"""

from __future__ import annotations

import difflib
import os
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from moonvit.errors import ConfigError

PREFIX = "MOONVIT_"
LOADING = ("model", "engine", "device", "dtype", "budget")
"""What decides about the model and not about the server; the command line reads their variables."""

Names = Annotated[tuple[str, ...], NoDecode]
"""Several words; in a variable they are separated by commas."""


class Settings(BaseSettings):
    """What an operator decides about the server; see each field's description."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: SecretStr | None = Field(None, description="Requests must carry this key as 'Authorization: Bearer KEY'.")
    cors_origins: Names = Field((), description="Web origins whose pages may call the API; none by default.")
    max_body: ByteSize = Field(ByteSize(64 << 20), gt=0, description="Bytes of one request body.")
    max_pending: ByteSize = Field(ByteSize(256 << 20), gt=0, description="Bytes of bodies and fetched pictures held.")
    max_images: int = Field(32, ge=0, description="Pictures in one request, its history included; 0 is none.")
    max_running: int = Field(4, ge=1, description="Requests the engine works on at once.")
    max_waiting: int = Field(32, ge=0, description="Requests that may wait for their turn; the next one gets 429.")
    media_hosts: Names = Field(
        (), description="Hosts from which http(s) picture addresses are fetched; none by default."
    )
    media_private: bool = Field(False, description="Let the media hosts resolve to private addresses.")
    media_workers: int = Field(8, ge=1, le=256, description="Picture addresses fetched at once.")
    media_timeout: float = Field(10.0, gt=0, le=600, description="Seconds for one picture address, redirects included.")
    body_timeout: float = Field(60.0, gt=0, le=3600, description="Seconds in which a request body must arrive.")
    write_timeout: float = Field(60.0, gt=0, le=3600, description="Seconds a client may stop reading a stream.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")

    @field_validator("cors_origins", "media_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, (list, tuple)):
            return tuple(item.strip() if isinstance(item, str) else item for item in value if item != "")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.max_pending < self.max_body:
            raise ValueError(f"max_pending = {self.max_pending} bytes is less than max_body = {self.max_body} bytes")
        key = None if self.api_key is None else self.api_key.get_secret_value()
        if key is not None and not key.strip():
            raise ValueError("api_key is empty: leave it out to serve without a key")
        if key is not None and key != key.strip():
            raise ValueError("api_key begins or ends with a blank or a line break, which no header can carry")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError("cors_origins holds '*' and also named origins; keep one of the two")
        for origin in self.cors_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise ValueError(f"cors_origins: {origin!r} is not an origin such as https://example.org")
        for host in self.media_hosts:
            if "/" in host or "*" in host:
                raise ValueError(f"media_hosts: {host!r} is not a host name such as images.example.org")
        if self.media_private and not self.media_hosts:
            raise ValueError("media_private is set but media_hosts is empty: no address would be fetched at all")
        return self


def load_settings(**flags: Any) -> Settings:
    """Read the settings from the command line and the environment.

    Args:
        **flags: Fields of ``Settings``; None means the flag was not given.

    Returns:
        The settings.

    Raises:
        ConfigError: A value is not legal, two contradict each other, a field does not exist, or a ``MOONVIT_``
            variable looks like a misspelt setting.
    """
    known = [PREFIX + name.upper() for name in (*Settings.model_fields, *LOADING)]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.9)
            if close:
                raise ConfigError(f"the variable {variable} is not a setting; did you mean {close[0]}?", param=variable)
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        reason = first["msg"].removeprefix("Value error, ")
        if name is None:
            raise ConfigError(reason) from None
        shown = "" if name == "api_key" else f" = {str(first['input'])[:80]!r}"
        raise ConfigError(f"{name}{shown}: {reason}", param=name) from None
