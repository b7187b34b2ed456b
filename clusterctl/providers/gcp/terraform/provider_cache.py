"""Providers are downloaded once: Google's is some 100 MB.

Terraform takes a provider from its shared cache only if the folder's lock file knows its checksum, so the
lock file of the first folder is kept beside the cache, and given to those after it. Whoever has a Terraform
configuration of their own has their own mirrors and caches, which we leave alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from clusterctl.state.journal import digest
from clusterctl.state.lock import hold
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.progress import Waiting

LOCK_FILE: Final = ".terraform.lock.hcl"
_VARIABLE: Final = "TF_PLUGIN_CACHE_DIR"
_HOMES: Final = ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG")


@contextmanager
def shared_providers(folder: Path, report: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """The variables with which `init` shares its downloads; one `init` at a time, as Terraform asks.

    Raises:
        LockedError: another `init` was at work all the time.
    """
    if _VARIABLE in os.environ or _has_configuration():
        yield {}
        return
    home = cache_home() / "terraform" / "providers"
    home.mkdir(parents=True, exist_ok=True)
    known = home / f"{digest(*(path.read_bytes() for path in sorted(folder.rglob('*.tf'))))}.lock.hcl"
    mine = folder / LOCK_FILE
    with hold(
        home / ".lock",
        "up",
        what="Terraform's cache of providers",
        waiting=lambda text: report(Waiting(text)),
    ):
        if known.is_file() and not mine.exists():
            write_atomic(mine, known.read_bytes())
        yield {_VARIABLE: str(home)}
        if mine.is_file() and not known.exists():
            write_atomic(known, mine.read_bytes())


def _has_configuration() -> bool:
    named = [Path(os.environ[name]) for name in _HOMES if name in os.environ]
    return any(path.is_file() for path in (named or [Path.home() / ".terraformrc"]))
