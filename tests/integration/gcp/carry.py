"""`up` or `down` of a ``Terraformed`` cluster in a process that a test kills.

Its arguments are WORKSPACE VERB. It imports no stand-in, which would take a third of its time.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from clusterctl.providers.base import Prompts
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.load import parse_spec
from clusterctl.spec.providers.gcp import settings_of
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import HostStep, Reporter


class Lines(Reporter):
    def progress(self, message: str | HostStep) -> None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()

    note = progress


def main(root: str, verb: str) -> None:
    # It is ignored if the tests run in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workspace = Workspace(Path(root))
    spec = parse_spec(workspace.spec.read_text(), "cluster.yaml")
    provider = GcpProvider(settings_of(spec), Prompts(reporter=Lines()))
    if verb == "down":
        provider.destroy(workspace.cluster_id(), workspace=workspace)
        return
    provider.plan(spec, workspace)
    Lines().progress("planned")
    provider.apply(spec, workspace)


if __name__ == "__main__":
    main(*sys.argv[1:])
