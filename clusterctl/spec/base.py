"""What all models of a spec share."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Model(BaseModel):
    """Base of all spec models: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_text(value: object) -> object:
    """Numbers are addresses to ``ipaddress``."""
    return str(value) if isinstance(value, int) else value


Toggle = Annotated[bool, Field(strict=True)]  # `yes` in quotes and 1 are neither true nor false
Network = Annotated[IPv4Network, BeforeValidator(_as_text)]
