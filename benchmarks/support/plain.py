"""clusterctl with Ansible's own linear strategy in mitogen's place, and nothing else changed."""

from __future__ import annotations

import sys

from clusterctl.cli.run import run
from clusterctl.configure import playbook

if __name__ == "__main__":
    playbook._mitogen = lambda *_: {"ANSIBLE_STRATEGY": "linear"}
    sys.exit(run())
