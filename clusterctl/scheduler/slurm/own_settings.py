"""What of Slurm's settings a node's slurmd is started anew for: all but the sizes of other nodes.

Of those it hears from slurmctld, so jobs elsewhere need not notice that a node got another GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

from clusterctl.state.journal import digest

_NODE: Final = re.compile(r"NodeName=(\S+) ")
_SIZE: Final = re.compile(r"(?<= )CPUs=.*?(?=Feature=)")
_PARTITION_SIZE: Final = re.compile(r"(?<= )DefMemPerCPU=\d+ ")


def slurmd_file(files: Mapping[str, str], hosts: Iterable[str]) -> str:
    """JSON: host -> a digest of what its slurmd is started with, of Slurm's files as rendered."""
    own: dict[str, list[str]] = {}
    common = [files["cgroup.conf"], files["topology.conf"]]
    for line in (*files["slurm.conf"].splitlines(), *files["gres.conf"].splitlines()):
        if match := _NODE.match(line):
            own.setdefault(match[1], []).append(line)
        if not (match and " Name=gpu " in line):
            common.append(_PARTITION_SIZE.sub("", _SIZE.sub("", line)))
    shared = digest(*common)
    return json.dumps({host: digest(shared, *own.get(host, ())) for host in hosts}, indent=1) + "\n"
