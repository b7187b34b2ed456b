"""The choice of the cluster for a command: by its name, by a spec file, or as the only cluster that
is up.
"""

from __future__ import annotations

import os
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
from clusterctl.spec.names import (
    DEFAULT_CLUSTER,
    SPEC_NAME,
    did_you_mean,
    find_spec,
    is_cluster_name,
)
from clusterctl.state.removal import leaving_error
from clusterctl.state.workspace import Workspace, clusters_up
from clusterctl.util.confine import reject_read
from clusterctl.util.progress import SILENT, LineReporter

_NAME_LINE: Final = re.compile(r"""^name:\s*(["']?)([a-z][a-z0-9-]*)\1\s*(?:#.*)?$""", re.MULTILINE)
_SIMILAR_NAMES: Final = (SPEC_NAME, "cluster.yml")
BUILT_IN: Final = Notice(
    "built-in-spec",
    "no cluster.yaml here: using the built-in local cluster (`clusterctl init` writes the file)",
)


@dataclass(frozen=True)
class ChosenCluster:
    """The cluster that a command is about, chosen by a spec file or a name.

    file: the spec file (YAML). Default: ./cluster.yaml if it exists, otherwise the only cluster
        that is up, otherwise the built-in local cluster.
    name: the name of a cluster, instead of a spec file. Its spec is then that of its last
        `clusterctl up`.
    note: called with a line for the user, such as which cluster was chosen.
    """

    file: Path | None = None
    name: str | None = None
    note: LineReporter = field(default=SILENT.note, repr=False)

    @property
    def is_given(self) -> bool:
        """Whether the user has named the spec file or the cluster."""
        return self.file is not None or self.name is not None

    @property
    def spec_file(self) -> Path | None:
        """Path of the spec: ``file``, otherwise ./cluster.yaml; None if that file does not
        exist.
        """
        path = self.file or find_spec(Path.cwd())
        if path is not None:
            reject_read(path)
        return path

    def workspace(self, *, named: bool = False) -> Workspace:
        """Return the cluster's local folder. If it exists, only the cluster's name is read from the
        spec.

        named: raise UsageError instead of choosing a cluster only because it is the only cluster
        that is up. Raise UsageError if the file can't be read or lacks a valid name, or if several
        clusters are up. Raise NotUpError if the spec file has errors, and the cluster is not up.
        """
        if self.name is not None:
            return self.named_workspace()
        path = self.spec_file
        if path is None:
            if only := self.only_cluster(named=named):
                return Workspace.of(only)
            self.note_built_in()
            return Workspace.of(DEFAULT_CLUSTER)
        return _known_workspace(path) or self._workspace_of_file(path)

    def named_cluster(self) -> str | None:
        """Return the name of the cluster that the user or ./cluster.yaml names. None: neither does.

        Raises the errors of ``workspace``.
        """
        return self.workspace().root.name if self.is_given or self.spec_file else None

    def note_built_in(self) -> None:
        """Note that the built-in local cluster is used. UsageError: a spec here has a similar
        name.
        """
        names: list[str] = []
        # A folder may be searchable, but not readable.
        with suppress(OSError):
            names = sorted(os.listdir())
        for name in names:
            if name.lower() in _SIMILAR_NAMES:
                raise UsageError(
                    f"{name} is not read, because the name of a spec is {SPEC_NAME}",
                    code="file-invalid",
                    about="spec-name",
                    where=str(Path(name).absolute()),
                    fix=f"`mv {name} {SPEC_NAME}`, or name the file with -f {name}",
                )
        self.note(BUILT_IN)

    def named_workspace(self) -> Workspace:
        """Return the local folder of cluster ``name``. UsageError: ``name`` is invalid or ``file``
        is set.
        """
        if self.file is not None:
            raise excluded("-f", "--cluster")
        if not is_cluster_name(self.name or ""):
            raise unknown_cluster(self.name or "")
        return Workspace.of(self.name or "")

    def only_cluster(self, *, named: bool = False) -> str | None:
        """Return the name of the only cluster that is up, if the user has chosen no cluster.

        Return None if the user has chosen a cluster, or if no cluster or the built-in cluster is
        up. Raise UsageError if several clusters are up; with ``named``, also if only a single
        cluster is up.
        """
        clusters = self._candidates()
        if not clusters:
            return None
        if named or len(clusters) > 1:
            raise UsageError(
                "no cluster is given, and this folder has no cluster.yaml",
                code="not-found",
                about="cluster-name",
                why=f"these clusters are up: {', '.join(clusters)}",
                fix=f"pass the name, such as `--cluster {clusters[0]}`, or the spec: -f FILE",
            )
        self.note(
            Notice(
                "only-cluster-up", f"using cluster {clusters[0]!r} (the only cluster that is up)"
            )
        )
        return clusters[0]

    def _candidates(self) -> list[str]:
        """Return the clusters that are up, if the user has chosen no cluster, and the built-in is
        not up.
        """
        if (
            self.name is not None
            or self.spec_file
            or DEFAULT_CLUSTER in (clusters := clusters_up())
        ):
            return []
        return clusters

    def _workspace_of_file(self, path: Path) -> Workspace:
        # Importing the spec models takes longer than everything else that most verbs do.
        from clusterctl.spec.load import read_name  # noqa: PLC0415

        try:
            name, spec_error = read_name(path)
        except UsageError as exc:
            reason = str(exc.problems[0]) if isinstance(exc, SpecError) else exc.why or exc.what
            raise UsageError(
                "the spec file has no valid cluster name",
                code="file-invalid",
                about="cluster-name",
                where=str(path),
                why=reason,
                fix="correct the file, or pass --cluster NAME (`clusterctl list` shows all "
                "clusters)",
            ) from exc
        workspace = Workspace.of(name)
        if spec_error is not None and not workspace.root.is_dir():
            raise NotUpError(
                f"cluster {name!r} is not up, and its spec file has errors",
                where=str(path),
                why="\n".join(map(str, spec_error.problems)),
                fix="correct the file and run `clusterctl up`; or choose a cluster without "
                "reading the file: pass --cluster NAME (`clusterctl list` shows all names)",
            )
        return workspace


def unknown_cluster(name: str) -> UsageError:
    """Return the error for a name that no cluster has."""
    fix = did_you_mean(name, clusters_up()) or "`clusterctl list` shows all clusters"
    return UsageError(f"there is no cluster {name!r}", code="not-found", about="cluster", fix=fix)


def _known_workspace(path: Path) -> Workspace | None:
    # Find the name without parsing the file, because importing a parser takes long.
    with suppress(OSError, UnicodeDecodeError):
        names = [match[2] for match in _NAME_LINE.finditer(path.read_text())]
        if len(names) == 1 and (workspace := Workspace.of(names[0])).root.is_dir():
            return workspace
    return None


@contextmanager
def naming_lock_holder(workspace: Workspace) -> Iterator[None]:
    """If the `with` block fails while another clusterctl process holds the cluster's lock, raise
    LockedError. If no `up` of the cluster has finished, or its `down` has not, raise NotUpError.

    The errors name the probable reason why the cluster does not answer.
    """
    try:
        yield
    except (NotUpError, SchedulerError, TransportError) as exc:
        worker = workspace.lock_holder()
        if exc.had_side_effects:
            raise
        if worker is None:
            if (leaving := leaving_error(workspace)) is not None:
                raise leaving from exc
            if isinstance(exc, NotUpError) or workspace.is_configured:
                raise
            raise NotUpError(
                f"cluster {workspace.root.name!r} is unfinished",
                about="unfinished",
                why=f"no `clusterctl up` has configured its hosts yet: {exc.cause}",
                fix="run `clusterctl up`, or remove the cluster with `clusterctl down`",
            ) from exc
        raise LockedError(
            f"another command has locked cluster {workspace.root.name!r}",
            why=f"{worker}; meanwhile, this failed: {exc.cause}",
            fix="wait until that command is done",
        ) from exc
