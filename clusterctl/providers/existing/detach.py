"""Listing and removal of clusterctl's folder on a cluster that other people run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import LeftoversError, UsageError, printable
from clusterctl.providers.attached import FolderEntry, SiteFolder
from clusterctl.spec.remote_folders import FOLDERS
from clusterctl.transport.base import Transport

_PROGRAMS: Final = Path(__file__).parent
# Removing many small files from a network file system takes long.
_REMOVAL_S: Final = 3600.0
# Reading all files of some environments on a network file system, too.
CHECK_S: Final = 600.0
_WHAT: Final = {folder.name: folder.what for folder in FOLDERS if folder.is_attached}


def folder_program(name: str) -> str:
    """Return a program for the login node that expands ~ and variables in its first argument, a
    folder.
    """
    return "\n".join(
        (_PROGRAMS / part).read_text(encoding="utf-8") for part in ("remote_folder.sh", name)
    )


_DETACH: Final = folder_program("remote_detach.sh")
_CHECK: Final = folder_program("remote_check.sh")


@dataclass(frozen=True, slots=True)
class AttachedFolder(SiteFolder):
    """Clusterctl's folder on a cluster, which has the mark ``cluster_id``."""

    transport: Transport
    folder: str
    cluster_id: str

    def entries(self) -> tuple[FolderEntry, ...]:
        return self._ask("")[0]

    def damaged(self, *, mend: bool = False) -> list[str]:
        """Return the paths in the folder of environments and Pythons whose files were removed or
        changed.

        mend: have the next build make these environments again, and take these Pythons out of use.
        """
        argv = ["sh", "-c", _CHECK, "check", self.folder, "mend" if mend else ""]
        return self.transport.run(argv, timeout_s=CHECK_S).stdout.splitlines()

    def remove(self) -> tuple[FolderEntry, ...]:
        entries, left = self._ask(self.cluster_id)
        if left:
            raise LeftoversError(
                "some files of clusterctl can't be removed from the cluster",
                about="folder",
                where=f"{self.transport.host}:{self.folder}",
                why="\n".join(left),
                fix="end the programs that use these files, then run `clusterctl detach` again",
            )
        return entries

    def _ask(self, cluster_id: str) -> tuple[tuple[FolderEntry, ...], list[str]]:
        argv = ["sh", "-c", _DETACH, "detach", self.folder, cluster_id]
        lines = self.transport.run(argv, timeout_s=_REMOVAL_S).stdout.splitlines()
        rows = [[printable(word) for word in line.split("\t")] for line in lines]
        marks = [words[1] for words in rows if words[0] == "mark"]
        if marks and marks[0] != self.cluster_id:
            raise UsageError(
                "the folder on the cluster does not belong to this cluster",
                code="exists",
                about="foreign-folder",
                where=f"{self.transport.host}:{self.folder}",
                why=f"its mark is {marks[0]!r}, and this cluster's id is {self.cluster_id!r}"
                if marks[0]
                else "it has no mark of clusterctl",
                fix="look at the folder; if it may go, remove it with `rm` on the login node",
            )
        named = [
            words[1:]
            for words in rows
            if words[0] == "entry" and len(words) == len(FolderEntry.__slots__)
        ]
        entries = [
            FolderEntry(name, int(kib) << 10, int(files), _WHAT.get(name, ""))
            for name, kib, files in named
        ]
        shown = tuple(
            entry for entry in entries if entry.what or not _is_small_file_of_ours(entry.name)
        )
        return shown, [words[1] for words in rows if words[0] == "left"]


def _is_small_file_of_ours(name: str) -> bool:
    return name in {".clusterctl-cluster", "job-profile.sh", ".job-profile.new", ".env.new"}
