"""The record of a host's earlier state on disk: a JSON document, and contents of files named by
their hash.

Only root can read it. The document is replaced atomically, so that a crash leaves the previous
document.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

VERSION = 1
# "before" is the owner's state, "after" the state that the roles left, "ours" the cluster's part.
EMPTY: dict[str, Any] = {
    "version": VERSION,
    "cluster": "",
    "sealed": False,
    # path -> role, before, after, time of the last change before
    "paths": {},
    # Patterns of paths that were searched already.
    "patterns": [],
    # before: hash of the list of all paths in /etc.
    "etc": {"before": "", "ours": []},
    # path -> whether the folder existed
    "trees": {},
    # path -> whether it was a mount point
    "mounts": {},
    # unit -> role, load, file, active
    "units": {},
    "reloads": [],
    "users": {"before": [], "ours": []},
    "groups": {"before": [], "ours": []},
    "packages": {"before": {}, "ours": [], "automatic": [], "marked": [], "settings": []},
    # path -> versions of a file of the cluster's that others changed
    "versions": {},
    # Roles whose files were restored, so that their units must read them, also after a crash.
    "changed": [],
}
ENTRIES: dict[str, Any] = {
    "paths": {"role": "", "before": {"kind": ""}},
    "units": {"role": "", "load": "", "file": "", "active": ""},
}


class SnapshotError(Exception):
    """The record of a host's earlier state is damaged, incomplete, or of a newer version."""


class Store:
    """The folder with the record (ledger.json) and the contents of files."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    @property
    def is_there(self) -> bool:
        """Whether ledger.json exists."""
        return (self.root / "ledger.json").exists()

    def read(self) -> dict[str, Any]:
        """Return the content of ledger.json, or an empty record if the file does not exist.

        Raises:
            SnapshotError: the file is damaged, or a newer clusterctl wrote it.
        """
        try:
            text = (self.root / "ledger.json").read_bytes()
        except FileNotFoundError:
            return dict(json.loads(json.dumps(EMPTY)))
        try:
            content = json.loads(text)
            if content["version"] > VERSION:
                raise SnapshotError(
                    f"a newer clusterctl wrote {self.root} on this host\nfix: use that version"
                )
            entries = (
                (entry, form) for name, form in ENTRIES.items() for entry in content[name].values()
            )
            if not (
                _has_form(content, EMPTY) and all(_has_form(entry, form) for entry, form in entries)
            ):
                raise ValueError("fields are missing or have other types")
            return dict(content)
        except (ValueError, KeyError, TypeError) as exc:
            raise SnapshotError(
                f"{self.root}/ledger.json is damaged ({exc}), nothing was changed\n"
                "fix: restore the file from a backup; or restore this host by hand from "
                f"{self.root}/contents, and delete {self.root}"
            ) from exc

    def write(self, snapshot: dict[str, Any]) -> None:
        """Replace ledger.json. If nothing has changed, write nothing, so that this works on a full
        disk.
        """
        text = json.dumps(snapshot, indent=1, sort_keys=True).encode() + b"\n"
        if not self.is_there or (self.root / "ledger.json").read_bytes() != text:
            self._write_file("ledger.json", text)

    def keep(self, content: bytes) -> str:
        """Store the content of a file, and return its hash."""
        name = hashlib.sha256(content).hexdigest()
        if not (self.root / "contents" / name).exists():
            self._write_file(f"contents/{name}", content)
        return name

    def content(self, name: str) -> bytes:
        """Return the stored content with this hash. Raise SnapshotError if it is missing or
        damaged.
        """
        try:
            content = (self.root / "contents" / name).read_bytes()
        except FileNotFoundError as exc:
            raise SnapshotError(f"{self.root}/contents/{name} is missing") from exc
        if hashlib.sha256(content).hexdigest() != name:
            raise SnapshotError(f"{self.root}/contents/{name} is damaged")
        return content

    def remove(self) -> None:
        """Delete the folder: ledger.json first, because without it the other files have no
        meaning.
        """
        if self.root.exists():
            (self.root / "ledger.json").unlink(missing_ok=True)
            shutil.rmtree(self.root)

    def _write_file(self, name: str, content: bytes) -> None:
        path = self.root / name
        for folder in (self.root, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        fresh = path.with_name(path.name + ".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a value has all keys of ``form`` (also in nested objects), with the same
    types.
    """
    inner = form.items() if isinstance(form, dict) else ()
    return isinstance(value, type(form)) and all(
        name in value and _has_form(value[name], inner_form) for name, inner_form in inner
    )
