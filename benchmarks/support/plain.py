"""clusterctl with Ansible's own linear strategy, without mitogen, on each node; nothing else is
changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from clusterctl.cli.main import run
from clusterctl.configure import ansible
from clusterctl.providers.local.provider import LocalProvider

if __name__ == "__main__":
    environment = ansible._environment

    def linear(private: Path) -> dict[str, str]:
        kept = environment(private).items()
        return {key: value for key, value in kept if not key.startswith("ANSIBLE_STRATEGY")}

    ansible._environment = linear
    LocalProvider.known_shared = None
    sys.exit(run())
