"""What the ledger of a host holds on disk: one JSON document, and the contents of files by their hash.

Only root reads it. It is written whole and put in place at once, so a crash leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

VERSION = 1
EMPTY: dict[str, Any] = {
    "version": VERSION,
    "cluster": "",
    "sealed": False,
    "paths": {},  # path -> role, before, after, when it was changed last before
    "patterns": [],  # of paths, those that were looked for already
    "etc": {"before": "", "ours": []},  # every path of /etc, by the hash of the list; those that came with us
    "trees": {},  # path -> whether it was there
    "mounts": {},  # path -> whether something was mounted there
    "units": {},  # unit -> role, load, file, active
    "reloads": [],
    "users": {"before": [], "ours": []},
    "groups": {"before": [], "ours": []},
    "packages": {"before": {}, "ours": [], "automatic": [], "marked": [], "settings": []},
    "versions": {},  # path -> what others have made of a file of ours
    "changed": [],  # roles whose files are put back: their units read them anew, also after a crash
}
ENTRIES: dict[str, Any] = {
    "paths": {"role": "", "before": {"kind": ""}},
    "units": {"role": "", "load": "", "file": "", "active": ""},
}


class LedgerError(Exception):
    """The ledger can't be used; the text says why."""


class Store:
    """The folder of a ledger."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    @property
    def is_there(self) -> bool:
        """Whether anything was noted."""
        return (self.root / "ledger.json").exists()

    def read(self) -> dict[str, Any]:
        """What was noted, or an empty ledger.

        Raises:
            LedgerError: it is damaged, or of a newer clusterctl.
        """
        try:
            text = (self.root / "ledger.json").read_bytes()
        except FileNotFoundError:
            return json.loads(json.dumps(EMPTY))
        try:
            found = json.loads(text)
            if found["version"] > VERSION:
                raise LedgerError(f"{self.root} was written by a newer clusterctl; use that one")
            entries = ((one, form) for name, form in ENTRIES.items() for one in found[name].values())
            if not (_fits(found, EMPTY) and all(_fits(one, form) for one, form in entries)):
                raise ValueError("it is of another form")
            return dict(found)
        except (ValueError, KeyError, TypeError) as exc:
            raise LedgerError(
                f"{self.root}/ledger.json is damaged ({exc}), nothing was changed: put back a copy of it; "
                f"or set this host right by hand, with what {self.root}/contents has, and remove {self.root}"
            ) from exc

    def write(self, ledger: dict[str, Any]) -> None:
        """Put it in place of the one before; what stands there already asks for no room on a full disk."""
        text = json.dumps(ledger, indent=1, sort_keys=True).encode() + b"\n"
        if not self.is_there or (self.root / "ledger.json").read_bytes() != text:
            self._put("ledger.json", text)

    def keep(self, content: bytes) -> str:
        """Keep these bytes; the hash that names them."""
        name = hashlib.sha256(content).hexdigest()
        if not (self.root / "contents" / name).exists():
            self._put(f"contents/{name}", content)
        return name

    def content(self, name: str) -> bytes:
        """The bytes of that hash.

        Raises:
            LedgerError: they are gone, or not what they were.
        """
        try:
            content = (self.root / "contents" / name).read_bytes()
        except FileNotFoundError as exc:
            raise LedgerError(f"{self.root}/contents/{name} is gone") from exc
        if hashlib.sha256(content).hexdigest() != name:
            raise LedgerError(f"{self.root}/contents/{name} is not what was kept")
        return content

    def remove(self) -> None:
        """Leave no trace of it. The document goes first: what is left without it says nothing."""
        if self.root.exists():
            (self.root / "ledger.json").unlink(missing_ok=True)
            shutil.rmtree(self.root)

    def _put(self, name: str, content: bytes) -> None:
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


def _fits(found: Any, form: Any) -> bool:
    """Return whether this has all keys of the form, with values of the same types."""
    inner = form.items() if isinstance(form, dict) else ()
    return isinstance(found, type(form)) and all(
        name in found and _fits(found[name], one) for name, one in inner
    )
