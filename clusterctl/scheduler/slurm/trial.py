"""Would Slurm accept a job, and when would the job start? `sbatch --test-only` submits nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import SlurmError
from clusterctl.scheduler.slurm.values import as_known_number

_START: Final = re.compile(r"^sbatch: Job \d+ to start at (\S+)", re.MULTILINE)
_PREFIX: Final = re.compile(r"^(sbatch: (error: )?|allocation failure: )+")


@dataclass(frozen=True, slots=True)
class SbatchTrial:
    """An answer of `sbatch --test-only`.

    words: the messages of Slurm and of the site. start: the expected start, in Unix seconds; None:
        unknown. asked_at: by the local clock, in Unix seconds.
    """

    accepted: bool
    words: str
    start: int | None
    asked_at: float

    @classmethod
    def of(cls, rc: int, stderr: str, asked_at: float) -> SbatchTrial:
        """Return the answer with this exit status and this stderr, with times as Unix seconds."""
        lines = (_PREFIX.sub("", line).strip() for line in stderr.splitlines())
        start = _START.search(stderr)
        return cls(
            accepted=rc == 0,
            words="; ".join(filter(None, lines)),
            start=as_known_number(start[1]) if start and rc == 0 else None,
            asked_at=asked_at,
        )

    @property
    def is_about_nodes_out(self) -> bool:
        """Whether Slurm refuses the job as it does if all its nodes are out of service."""
        return not self.accepted and SlurmError.nodes_out.search(self.words) is not None
