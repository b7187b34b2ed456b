"""Writes files of a single host, and restarts the units that read them. Runs on the host, as root.

The request is '{"files": {"/etc/x": ["text", 420, null], "/etc/hosts": ["text", 420, ["# BEGIN", "#
END"]]}, "wanted": {"marks": {...}}}': text, mode, and the lines between which the text belongs
(null: it is the whole file). If a file is a drop-in of a unit, the unit is restarted. Files are replaced
atomically. `wanted` changes the host's record of what is wanted there (clusterctl.util.remote_wanted),
before the files are written. Standard library, Python 3.9.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from clusterctl.util.remote_wanted import WANTED, update_wanted


def place(path: str, text: str, mode: int) -> None:
    new = f"{path}.clusterctl-new"
    Path(new).unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    Path(new).replace(path)


def with_block(content: str, text: str, begin: str, end: str) -> str:
    """Replace the text between the lines ``begin`` and ``end`` in ``content``, or append all
    three.
    """
    before, _, rest = content.partition(f"{begin}\n")
    return before + f"{begin}\n{text}{end}\n" + rest.partition(f"{end}\n")[2]


def main(request: str, record: str = WANTED) -> None:
    asked = json.loads(request)
    update_wanted(asked["wanted"], record)
    units = []
    for path, (text, mode, edges) in asked["files"].items():
        place(path, with_block(Path(path).read_text(), text, *edges) if edges else text, mode)
        if path.endswith(".conf") and Path(path).parent.suffix == ".d":
            units.append(Path(path).parent.stem)
    if units:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "restart", *units], check=True)
