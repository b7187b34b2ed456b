"""The workspace's folder of Terraform: our module, the variables, the state; plain `terraform` works on it.

Files of ours are kept as this clusterctl has them. `*_override.tf` are the user's, others are Terraform's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.providers.gcp.terraform import BACKEND_FILE
from clusterctl.spec.gcp import GcsState
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.workspace import write_atomic
from clusterctl.util.assets import asset, tree_files

VARIABLES: Final = "clusterctl.auto.tfvars.json"
_BACKEND: Final = "clusterctl_backend.tf.json"


def is_laid(folder: Path) -> bool:
    """Whether there is a module in it, and perhaps a state."""
    return (folder / "main.tf").is_file()


def controller(folder: Path) -> str:
    """The name of the controller that was asked for last; "" if that can't be read."""
    try:
        hosts = json.loads((folder / VARIABLES).read_bytes())["hosts"].items()
    except (OSError, ValueError, KeyError):
        return ""
    return next((name for name, host in hosts if host["role"] == CONTROLLER), "")


def lay(folder: Path, variables: Mapping[str, Any], state: GcsState | None, *, cluster: str) -> None:
    """Bring our files up to date; what has not changed is left alone.

    Raises:
        UsageError: the state is somewhere else than the spec says now.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    backend = _backend(state, cluster)
    _refuse_moved_state(folder, backend)
    source = asset("terraform") / "gcp"
    wanted = {path.relative_to(source): path.read_bytes() for path in tree_files(source)}
    for path in [*folder.glob("*.tf"), *folder.glob("modules/**/*.tf")]:
        if path.relative_to(folder) not in wanted and not path.name.endswith("_override.tf"):
            path.unlink()  # of an older module
    for inner, content in wanted.items():
        _write(folder / inner, content)
    for name, text in backend.items():
        _write(folder / name, text.encode())
    _write(folder / VARIABLES, (json.dumps(variables, indent=2) + "\n").encode())


def _backend(state: GcsState | None, cluster: str) -> dict[str, str]:
    if state is None:
        return {}
    where = {"bucket": state.bucket, "prefix": f"{state.prefix}/{cluster}"}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in where.items()]
    return {BACKEND_FILE: "".join(lines), _BACKEND: '{"terraform": {"backend": {"gcs": {}}}}\n'}


def _refuse_moved_state(folder: Path, backend: Mapping[str, str]) -> None:
    """With a state that it does not find, Terraform would make everything a second time."""
    if not is_laid(folder):
        return
    path = folder / BACKEND_FILE
    before = path.read_text() if path.is_file() else None
    if before != backend.get(BACKEND_FILE):
        raise UsageError(
            "the state of a cluster that is up is not moved",
            where="provider.state",
            why=f"it is {f'where {path} says' if before else f'in {folder}'}",
            fix="put provider.state back, or take the cluster down first",
        )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)
