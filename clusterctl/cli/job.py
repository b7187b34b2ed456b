"""submit, jobs, logs, cancel, collect: the verbs of a job's life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.cluster import job_table
from clusterctl.cli.options import Options, verb
from clusterctl.cli.show import Screen
from clusterctl.cli.spec import spec_of

if TYPE_CHECKING:
    from clusterctl.jobs import Session
    from clusterctl.spec import ClusterSpec
    from clusterctl.workspace import Workspace

Out = Annotated[Path | None, typer.Option(help="Folder for collected runs. Default: ./runs.")]


@contextmanager
def _session(screen: Screen, options: Options) -> Iterator[Session]:
    """A connection to the controller as the job user."""
    from clusterctl import jobs, lifecycle
    from clusterctl.spec.load import load_spec
    from clusterctl.workspace import Workspace

    workspace = Workspace.of(spec_of(screen, options).name)
    inventory = lifecycle.inventory_of(workspace)
    with jobs.session(load_spec(workspace.spec), inventory, workspace) as session:
        yield session
