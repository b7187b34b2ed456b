"""dnf, createrepo_c and rpmkeys on a machine that has none: in a Debian tree that is kept in the
cache.

    with dnf_tools() as folder:       # put it before PATH
        ...

As a program (`python -m tests.e2e.dnf_tools FOLDER`, as root) this module makes the tree.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from clusterctl.providers.local.image import DEBIAN, DEFAULT_MIRROR, debootstrap
from clusterctl.state.workspace import cache_home
from tests.support.processes import ROOT, as_root

PACKAGES: Final = ("ca-certificates", "createrepo-c", "dnf", "dnf-plugins-core", "rpm")
TOOLS: Final = ("dnf", "createrepo_c", "rpmkeys")
_TIMEOUT_S: Final = 600
# In a mount namespace of its own, so that nothing is left. Paths in the command mean what they mean
# here.
_ENTER: Final = """\
#!/bin/sh
exec {root} unshare --mount -- sh -ec '
tree=$1; shift
for place in {places}; do
    mkdir -p "$tree$place"
    mount --rbind "$place" "$tree$place"
done
exec chroot "$tree" "$@"' sh {tree} {tool} "$@"
"""


@contextmanager
def dnf_tools(*places: Path) -> Iterator[Path]:
    """A folder of programs that act on these places of this machine, and on /proc."""
    tree = cache_home() / "test-dnf"
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tree.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.is_dir():
            argv = [*as_root(), sys.executable, "-m", "tests.e2e.dnf_tools", str(tree)]
            subprocess.run(argv, cwd=ROOT, check=True, timeout=_TIMEOUT_S)
    with TemporaryDirectory(prefix="tools-") as name:
        for tool in TOOLS:
            script = Path(name) / tool
            words = {"root": " ".join(as_root()), "tree": tree, "tool": tool}
            script.write_text(_ENTER.format(places=" ".join(map(str, (*places, "/proc"))), **words))
            script.chmod(0o755)
        yield Path(name)


def main() -> None:
    """Create the tree. Its folder is renamed to its final name when it is complete."""
    tree = Path(sys.argv[1])
    building = tree.with_name(f"{tree.name}.building")
    subprocess.run(["rm", "-rf", "--one-file-system", str(building)], check=True)
    debootstrap(building, DEFAULT_MIRROR, PACKAGES, DEBIAN.suites["debian-12"])
    building.rename(tree)


if __name__ == "__main__":
    main()
