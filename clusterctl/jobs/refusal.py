"""What to do when Slurm does not take a job."""

from __future__ import annotations

import re

from clusterctl.errors import SlurmError, TransportError
from clusterctl.scheduler.slurm.client import SlurmClient

# What Slurm says -> the flag that is wrong, and what `SlurmClient.choices` calls its values.
_REFUSALS = (
    (re.compile("invalid account", re.IGNORECASE), "--account", "account"),
    (re.compile("invalid partition|partition name", re.IGNORECASE), "--partition", "partition"),
    (re.compile("invalid qos", re.IGNORECASE), "--qos", "qos"),
    (re.compile("feature", re.IGNORECASE), "--constraint", "feature"),
    (re.compile("gres|gpu", re.IGNORECASE), "--gpus", "gres"),
)
_TOO_LARGE = re.compile("node configuration is not available|Node count|More processors|limit", re.IGNORECASE)


def fix_of(slurm: SlurmClient, why: str) -> str:
    """What to do about a refusal in Slurm's words, with the valid choices where Slurm can say them."""
    for pattern, flag, kind in _REFUSALS:
        if pattern.search(why):
            try:
                choices = slurm.choices(kind)
            except (SlurmError, TransportError):  # the refusal itself is what matters
                choices = ()
            if choices:
                return f"{flag} can be: {', '.join(choices)}"
            return f"leave out {flag}: this cluster has none"
    if _TOO_LARGE.search(why):
        return "ask for less; `clusterctl status` shows the nodes, their cores and memory"
    return "correct what Slurm names"
