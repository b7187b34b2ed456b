"""The GPUs of a node, the same for every provider."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from clusterctl.spec.base import Model

GPU_TYPE: Final = r"^[a-z][a-z0-9-]{1,30}$"
MOST_GPUS: Final = 16


class Gpus(Model):
    """The GPUs of a node."""

    type: Annotated[str, StringConstraints(pattern=GPU_TYPE)] = Field(
        description="their type, such as l4, t4, a100, h100"
    )
    count: Annotated[int, Field(ge=1, le=MOST_GPUS, strict=True)] = Field(
        1, description="how many on each node"
    )

    def __str__(self) -> str:
        """``2 x l4``."""
        return f"{self.count} x {self.type}"
