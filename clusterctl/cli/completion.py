"""What TAB offers: words from the workspace and the current folder, never from the network.

It must be quick, so files are read plainly here, without the models that check them. What a shell could take
for more than a word is not offered: zsh evaluates even what is said of one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from clusterctl.util.disk import read_rows

_NAME = re.compile(r"^name:\s*['\"]?([a-z][a-z0-9-]*)", re.MULTILINE)
_PROGRAMS = (".py", ".sh", ".bash", ".yaml", ".yml")
_PLAIN = re.compile(r"[\w.+][\w.+-]*")  # a shell takes it as it is
_NOT_PLAIN = re.compile(r"[^\w.+-]")


def jobs_to_submit(incomplete: str) -> list[str]:
    """Bundled jobs, and the scripts and job files of this folder; other paths the shell completes itself."""
    from clusterctl.spec.job import BUNDLED_JOBS

    try:
        names = [path.name for path in Path().iterdir()]
    except OSError:  # a folder that can't be listed
        names = []
    here = sorted(name for name in names if name.endswith(_PROGRAMS))
    return _offered((*BUNDLED_JOBS, *here), incomplete)


def job_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Jobs submitted from here, the newest first, with their names."""
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, UnicodeDecodeError):
        for row in read_rows(_workspace(ctx) / "jobs.jsonl"):
            found.setdefault(row.get("token", ""), {}).update(row)
    names = {str(row.get("job_id", "")): str(row.get("name") or "") for row in found.values()}
    return [(job_id, _NOT_PLAIN.sub("_", names[job_id])) for job_id in _offered(reversed(names), incomplete)]


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    """Hosts of the cluster."""
    return _offered((host["name"] for host in _hosts(ctx)), incomplete)


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions of the cluster."""
    names = dict.fromkeys(host["partition"] for host in _hosts(ctx) if host.get("partition"))
    return _offered(names, incomplete)


def clusters(incomplete: str) -> list[str]:
    """Clusters that were raised from here."""
    names = (path.parent.name for path in _state_home().glob("*/hosts.json"))
    return _offered(sorted(names), incomplete)


def launchers(incomplete: str) -> list[str]:
    """How ranks are started."""
    return _offered(("srun", "mpirun"), incomplete)


def _offered(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def _workspace(ctx: typer.Context) -> Path:
    """The folder of the cluster that the words typed so far mean."""
    given = {**(ctx.parent.params if ctx.parent else {}), **{k: v for k, v in ctx.params.items() if v}}
    return _state_home() / (given.get("cluster") or _name_in(Path(given.get("file") or "cluster.yaml")))


def _name_in(spec: Path) -> str:
    try:
        match = _NAME.search(spec.read_text(errors="replace"))
    except OSError:
        return "local"  # the built-in one
    return match[1] if match else ""


def _hosts(ctx: typer.Context) -> list[dict[str, Any]]:
    try:
        return list(json.loads((_workspace(ctx) / "hosts.json").read_bytes())["hosts"])
    except (OSError, ValueError, KeyError):
        return []  # not up: nothing to offer


def _state_home() -> Path:
    from clusterctl.errors import MachineError
    from clusterctl.state.workspace import state_home

    try:
        return state_home()
    except MachineError:
        return Path(os.devnull)
