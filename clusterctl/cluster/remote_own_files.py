"""Runs on a node, as root: writes files that it has for itself, and restarts the units that read them.

It is asked '{"files": {"/etc/x": ["text", 420]}, "blocks": {"/etc/hosts": ["# BEGIN\n", "text", "# END\n"]},
"units": {"slurmd": "/etc/x"}}': a block stands in its file already; a unit is restarted if its file is here.
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


def with_block(found: str, begin: str, text: str, end: str) -> str:
    before, _, rest = found.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def main(request: str) -> None:
    asked = json.loads(request)
    for path, block in asked["blocks"].items():
        mode = Path(path).stat().st_mode & 0o7777
        place(path, with_block(Path(path).read_text(), *block), mode)
    for path, (text, mode) in asked["files"].items():
        place(path, text, mode)
    stale = [unit for unit, path in asked["units"].items() if path in asked["files"]]
    if stale:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "restart", *stale], check=True)
