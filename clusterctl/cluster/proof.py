"""What a proof job has shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterctl.cluster.node_states import Aside


@dataclass(frozen=True, slots=True)
class Proof:
    """``probed`` hosts ran the job together; ``busy`` ones run users' jobs, ``aside`` ones a person drained.

    ``resumed`` has the nodes that Slurm had taken out of service, with the state they were in.
    """

    probed: tuple[str, ...]
    busy: tuple[str, ...] = ()
    aside: tuple[Aside, ...] = ()
    resumed: Mapping[str, str] = field(default_factory=dict)
