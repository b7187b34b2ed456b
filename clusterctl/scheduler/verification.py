"""The verification job of a cluster: the payload's probe, which travels with its command."""

from __future__ import annotations

import json
from collections.abc import Sequence

from clusterctl.transport.base import BOOT, module_texts
from clusterctl.util.assets import asset

# The time limit grows by this for each node: many local nodes start their ranks on few cores.
VERIFICATION_PER_NODE_S = 3


def verification_argv(root: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank of the payload's probe, which travels with it: nodes need only mpi4py."""
    texts = module_texts("payload.commands.probe", asset("payload").parent)
    return (f"{root}/env/bin/python", "-c", BOOT, texts, json.dumps([",".join(hosts)]))
