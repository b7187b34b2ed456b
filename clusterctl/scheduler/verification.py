"""The verification job of a cluster: the payload's probe, which travels with its command."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

from clusterctl.transport.base import module_texts
from clusterctl.util.assets import asset

# The time limit grows by this for each node: many local nodes start their ranks on few cores.
VERIFICATION_PER_NODE_S = 3
# Makes modules of (name, text) pairs, under the names they import each other by; calls the last one's main.
_PROBE = """\
import base64, json, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(sys.argv[1]))):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
module.main(sys.argv[2])
"""


def verification_argv(root: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank of the payload's probe, which travels with it: nodes need only mpi4py."""
    texts = module_texts("payload.commands.probe", asset("payload").parent)
    program = base64.b64encode(zlib.compress(texts.encode())).decode()
    return (f"{root}/env/bin/python", "-c", _PROBE, program, ",".join(hosts))
