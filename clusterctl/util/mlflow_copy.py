"""Copies the runs of a local MLflow store to the user's tracking server, with MLflow's public
interface. The Python of the user's MLflow runs it: 3.9 or newer.

    main(STORE, FROM, TO...)

STORE: URI of the local store. FROM TO: a folder as the store names it, and its place on this machine;
repeatable, and the first that fits is used. MLFLOW_TRACKING_URI in the environment: the server.

A copied run has the tags SOURCE, its id in the local store, and COMPLETE once everything was copied:
no run is copied twice, and an incomplete copy is replaced. Models, traces and the registry of the
store are not copied.

MLflow has no command for this: `mlflow migrate-filestore` (3.17) converts a store on this machine, and
`export-run` of mlflow-export-import (1.2) leaves out the artifacts of a store that was moved, and
exits with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

SOURCE = "clusterctl.source_run"
COMPLETE = "clusterctl.complete"
# Instead of artifacts that are not in the job's folder: where they are.
ELSEWHERE = "clusterctl.artifacts"
# Limits of a call of log-batch.
MOST_METRICS = 1000
MOST_OTHERS = 100


def main(store: str, *folders: str) -> None:
    # The current folder is the user's, and may have modules of any name.
    sys.path[:] = [path for path in sys.path if path]
    from mlflow import MlflowClient

    source = MlflowClient(tracking_uri=store)
    server = MlflowClient()
    moved = list(zip(folders[::2], folders[1::2]))
    for experiment in pages(source.search_experiments):
        for run in pages(source.search_runs, experiment_ids=[experiment.experiment_id]):
            copy(source, server, experiment.name, run, moved)


def pages(search: Callable[..., Any], **options: Any) -> Iterator[Any]:
    page = search(**options)
    yield from page
    while page.token:
        page = search(page_token=page.token, **options)
        yield from page


def copy(
    source: Any, server: Any, experiment: str, run: Any, moved: Sequence[tuple[str, str]]
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    run_id = run.info.run_id
    name = run.info.run_name
    experiment_id = find_experiment(server, experiment)
    for earlier in pages(
        server.search_runs,
        experiment_ids=[experiment_id],
        filter_string=f"tags.`{SOURCE}` = '{run_id}'",
    ):
        if COMPLETE in earlier.data.tags:
            return
        server.delete_run(earlier.info.run_id)
    created = server.create_run(
        experiment_id, start_time=run.info.start_time, tags={SOURCE: run_id}, run_name=name
    )
    new = created.info.run_id
    for tags in batches([RunTag(*item) for item in run.data.tags.items()], MOST_OTHERS):
        server.log_batch(new, tags=tags)
    for params in batches([Param(*item) for item in run.data.params.items()], MOST_OTHERS):
        server.log_batch(new, params=params)
    for key in run.data.metrics:
        history = source.get_metric_history(run_id, key)
        values = [Metric(key, each.value, each.timestamp, each.step) for each in history]
        for metrics in batches(values, MOST_METRICS):
            server.log_batch(new, metrics=metrics)
    if run.inputs.dataset_inputs:
        server.log_inputs(new, run.inputs.dataset_inputs)
    uri = run.info.artifact_uri
    folder = local_folder(uri, moved)
    if folder is None:
        server.set_tag(new, ELSEWHERE, uri)
        print(f"note: the artifacts of run {name} stay at {uri}", flush=True)
    elif os.path.isdir(folder):
        server.log_artifacts(new, folder)
    # The job has ended. A run without an end was cut off.
    status = run.info.status if run.info.end_time else "KILLED"
    server.set_terminated(new, status, run.info.end_time)
    server.set_tag(new, COMPLETE, "true")
    print(f"run {name} of experiment {experiment} was copied", flush=True)


def local_folder(uri: str, moved: Sequence[tuple[str, str]]) -> str | None:
    """Return where a run's artifacts are on this machine, if it has any. None: they are elsewhere."""
    parts = urlsplit(uri)
    path = unquote(parts.path) if parts.scheme == "file" else uri
    for before, now in moved:
        if path.startswith(before + "/"):
            # The store is a job's, and may name any folder of this machine.
            folder = os.path.realpath(now + path[len(before) :])
            return folder if folder.startswith(os.path.realpath(now) + "/") else None
    return None


def find_experiment(server: Any, name: str) -> str:
    found = server.get_experiment_by_name(name)
    return str(found.experiment_id if found else server.create_experiment(name))


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


if __name__ == "__main__":
    main(*sys.argv[1:])
