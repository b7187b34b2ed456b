"""Commands that `--cluster all` runs on all clusters of the user that are up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, Notice, NotUpError, UsageError
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import clusters_up
from clusterctl.util.process import call_on_hosts

ALL: Final = "all"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterAnswers(Generic[T]):
    """The answers of clusters, and the errors of those that did not answer, by name."""

    found: Mapping[str, T]
    errors: Mapping[str, ClusterctlError]

    def unanswered(self) -> list[dict[str, Any]]:
        """Return a dict for each cluster that did not answer, for JSON."""
        return [
            {"cluster": name, "code": error.code, "about": error.about, "error": error.what}
            for name, error in self.errors.items()
        ]

    def note_errors(self, screen: Screen) -> None:
        for name, error in self.errors.items():
            text = f"cluster {name} is not listed: {error.what}"
            screen.note(
                Notice("cluster-missing", f"{text}; fix: {error.fix}" if error.fix else text)
            )


def are_all(screen: Screen, names: Sequence[str]) -> bool:
    """Return whether the user has chosen all clusters. names: the jobs that the user has given.

    Raises UsageError if there are such jobs, because each is of one cluster.
    """
    if screen.cluster != ALL:
        return False
    if names:
        raise UsageError(
            "--cluster all shows all jobs, and job IDs were given",
            code="options-exclusive",
            fix="leave out the IDs, or name the cluster of the jobs with --cluster",
        )
    return True


def all_clusters(screen: Screen) -> dict[str, ChosenCluster]:
    """Return the user's clusters that are up, by name. Raises NotUpError if no cluster is up."""
    names = clusters_up()
    if not names:
        raise NotUpError("no cluster is up", fix="`clusterctl up` creates a cluster")
    return {name: ChosenCluster(None, name, screen.note) for name in names}


def ask_all(names: Sequence[str], ask: Callable[[str], T]) -> ClusterAnswers[T]:
    """Ask all clusters at once. Raises the error of the first cluster if no cluster answers."""
    found, errors = call_on_hosts(names, ask)
    if errors and not found:
        raise next(iter(errors.values()))
    return ClusterAnswers(found, errors)
