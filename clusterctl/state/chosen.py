"""The cluster that a user means: by its name, by a spec file, or because no other is up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterctl.errors import (
    LockedError,
    Notice,
    NotUpError,
    SchedulerError,
    SpecError,
    TransportError,
    UsageError,
    excluded,
)
from clusterctl.spec.names import DEFAULT_CLUSTER, find_spec, is_cluster_name
from clusterctl.state.workspace import Workspace, clusters_up
from clusterctl.util.progress import SILENT, LineReporter

_NAME_LINE: Final = re.compile(r"""^name:\s*(["']?)([a-z][a-z0-9-]*)\1\s*(?:#.*)?$""", re.MULTILINE)
BUILT_IN: Final = Notice(
    "built-in-spec", "no cluster.yaml here: using the built-in local cluster (`clusterctl init` writes one)"
)


@dataclass(frozen=True)
class ChosenCluster:
    """The cluster of a spec file or of a name.

    file: the spec file. None: ./cluster.yaml if it exists, else the only cluster that is up, else the
        built-in local cluster.
    name: the name of a cluster, whose applied spec is used.
    note: called with a line for the user, such as which cluster is taken.
    """

    file: Path | None = None
    name: str | None = None
    note: LineReporter = field(default=SILENT.note, repr=False)

    @property
    def spec_file(self) -> Path | None:
        """The spec file, if one is named or ./cluster.yaml exists."""
        return self.file or find_spec(Path.cwd())

    def workspace(self, *, named: bool = False) -> Workspace:
        """Return the cluster's workspace. Of the spec file of a cluster that is up, only the name is read.

        named: reject a cluster that is chosen only because no other is up.

        Raises:
            UsageError: the file can't be read, or not even its name; or several clusters are up.
            NotUpError: the file is wrong, and the cluster is not up.
        """
        if self.name is not None:
            return self.named_workspace()
        path = self.spec_file
        if path is None:
            if only := self.only_cluster(named=named):
                return Workspace.of(only)
            self.note(BUILT_IN)
            return Workspace.of(DEFAULT_CLUSTER)
        return _known_workspace(path) or self._workspace_of_file(path)

    def named_workspace(self) -> Workspace:
        """Return the workspace of ``name``.

        Raises:
            UsageError: no cluster can have this name, or a file is named too.
        """
        if self.file is not None:
            raise excluded("-f", "--cluster")
        if not is_cluster_name(self.name or ""):
            raise unknown_cluster(self.name or "")
        return Workspace.of(self.name or "")

    def only_cluster(self, *, named: bool = False) -> str | None:
        """Return the only cluster that is up. None: a cluster is named, or the built-in one is meant.

        Raises:
            UsageError: several are up, and none of them is the built-in one; or it must be ``named``.
        """
        up = clusters_up()
        if self.name is not None or self.spec_file or not up or DEFAULT_CLUSTER in up:
            return None
        if named or len(up) > 1:
            raise UsageError(
                "no cluster is named, and there is no cluster.yaml here",
                code="no-cluster-named",
                why=f"{'these are' if len(up) > 1 else 'this one is'} up: {', '.join(up)}",
                fix=f"name it: `--cluster {up[0]}`, or its spec: -f FILE",
            )
        self.note(Notice("only-cluster-up", f"using cluster {up[0]!r} (the only one that is up)"))
        return up[0]

    def _workspace_of_file(self, path: Path) -> Workspace:
        # The models of specs take longer to import than all else that most verbs do.
        from clusterctl.spec.load import read_name  # noqa: PLC0415

        try:
            name, wrong = read_name(path)
        except UsageError as exc:
            why = str(exc.problems[0]) if isinstance(exc, SpecError) else exc.why or exc.what
            raise UsageError(
                "the spec file does not say which cluster is meant",
                code="spec-without-name",
                where=str(path),
                why=why,
                fix="correct it, or name the cluster: --cluster NAME (`clusterctl list` shows them)",
            ) from exc
        workspace = Workspace.of(name)
        if wrong is not None and not workspace.root.is_dir():
            raise NotUpError(
                f"cluster {name!r} is not up, and its spec file is wrong",
                code="not-up",
                where=str(path),
                why="\n".join(map(str, wrong.problems)),
                fix="correct it, then `clusterctl up`; or name the cluster, for which no spec is read: "
                f"--cluster NAME ({name}, if `down` is to remove what an earlier one left; `clusterctl list` "
                "shows others)",
            )
        return workspace


def unknown_cluster(name: str) -> UsageError:
    """Return the error about a name of no cluster."""
    return UsageError(
        f"there is no cluster {name!r}",
        code="unknown-cluster",
        fix="`clusterctl list` shows the clusters there are",
    )


def _known_workspace(path: Path) -> Workspace | None:
    """Return the workspace that the only line with a name in the file means, if it exists."""
    with suppress(OSError, UnicodeDecodeError):
        names = [match[2] for match in _NAME_LINE.finditer(path.read_text())]
        if len(names) == 1 and (workspace := Workspace.of(names[0])).root.is_dir():
            return workspace
    return None


@contextmanager
def naming_lock_holder(workspace: Workspace) -> Iterator[None]:
    """If the body gets no answer while another clusterctl holds the cluster's lock, name that clusterctl.

    Raises:
        LockedError: the body failed for want of an answer, and the lock is held.
    """
    try:
        yield
    except (NotUpError, SchedulerError, TransportError) as exc:
        worker = workspace.worker()
        if worker is None or exc.had_side_effects:
            raise
        raise LockedError(
            f"cluster {workspace.root.name!r} is locked",
            why=f"{worker}; until then: {exc.cause}",
            fix="wait until it is done",
        ) from exc
