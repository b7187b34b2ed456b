"""What all models of a spec share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Base of all spec models: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
