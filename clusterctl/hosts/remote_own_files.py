"""Runs on a node, as root: writes files that it has for itself, and restarts the units that read them.

It is asked '{"/etc/x": ["text", 420, null], "/etc/hosts": ["text", 420, ["# BEGIN", "# END"]]}': the second
text replaces what stands between these lines. If a file is a drop-in of a unit, this is restarted.
Standard library, Python 3.9. Whatever ends it, each file is the old one or the new one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


def place(path: str, text: str, mode: int) -> None:
    new = f"{path}.clusterctl-new"
    Path(new).unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    Path(new).replace(path)


def with_block(found: str, text: str, begin: str, end: str) -> str:
    """Return the content of a file with this text between the two lines, at its end if they are not there."""
    before, _, rest = found.partition(f"{begin}\n")
    return before + f"{begin}\n{text}{end}\n" + rest.partition(f"{end}\n")[2]


def main(request: str) -> None:
    units = []
    for path, (text, mode, edges) in json.loads(request).items():
        place(path, with_block(Path(path).read_text(), text, *edges) if edges else text, mode)
        if path.endswith(".conf") and Path(path).parent.suffix == ".d":
            units.append(Path(path).parent.stem)
    if units:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "restart", *units], check=True)
