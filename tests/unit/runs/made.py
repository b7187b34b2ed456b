"""Runs as `collect` leaves them, made without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterctl.runs.metric_files import MetricFiles
from clusterctl.runs.series import summarize
from clusterctl.runs.time_use import Records, TimeEvidence, find_time_use
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.run_record import RunRecord, TaskRecord

TIME = 1_760_000_000


def record(job_id: int = 1, **fields: Any) -> dict[str, Any]:
    """What run.json has of a job that completed, by default on one node."""
    nodes = fields.get("nodes", ["demo-train-1"])
    return {
        "token": f"{job_id:08x}",
        "cluster": "demo",
        "job_id": str(job_id),
        "name": "train",
        "user": "ada",
        "partition": "train",
        "account": "",
        "state": "COMPLETED",
        "final": True,
        "tasks": [{"id": str(job_id), "state": "COMPLETED", "exit_code": 0, "nodes": nodes}],
        "nodes": nodes,
        "submit_time": TIME + job_id,
        "start_time": TIME + job_id + 1,
        "end_time": TIME + job_id + 61,
        "elapsed_s": 60,
        "collected_at": TIME + 100.0,
        "remote_dir": "/shared/home/ada/clusterctl/jobs/train",
        "files": 3,
        "bytes": 1000,
        **fields,
    }


def made_run(
    out: Path,
    job_id: int = 1,
    *,
    args: Sequence[str] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    files: Mapping[str, str] = {},
    job: Mapping[str, Any] = {},
    client: Mapping[str, Any] = {},
    hosts: Mapping[str, Any] = {},
    **fields: Any,
) -> RunRecord:
    """A run of `train`; ``files`` are the hashes of what was sent, ``job`` is what was asked
    for.
    """
    folder = out / f"demo-{job_id}-{fields.get('name', 'train')}"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    facts = {"clusterctl": "1.0", "job": {"args": list(args), **job}, **client}
    environment = {"client": facts, "slurm": "22.05.8", "hosts": hosts}
    (folder / "environment.json").write_text(json.dumps(environment))
    sent = [{"path": path, "sha256": sha256} for path, sha256 in files.items()]
    (folder / "source.json").write_text(json.dumps({"version": 1, "files": sent, "links": []}))
    fields_of_record = record(
        job_id, **{"args": list(args), **vars(summarize(folder, args)), **fields}
    )
    told = fields_of_record.pop("diagnosis", None)
    made = RunRecord.model_validate({**fields_of_record, "directory": folder})
    tasks = tuple(
        task if task.time_use else task.model_copy(update={"time_use": time_use_in(made, task)})
        for task in map(with_attempt, made.tasks)
    )
    of_task = str((told or {}).get("job_id", tasks[0].id))
    tasks = tuple(
        task.model_copy(update={"diagnosis": told}) if task.id == of_task else task
        for task in tasks
    )
    (folder / "run.json").write_text(made.model_copy(update={"tasks": tasks}).as_json())
    return RunRecord.load(folder)


def with_attempt(task: TaskRecord) -> TaskRecord:
    """The task with an attempt of its times, unless it has others or never started."""
    if task.attempts or task.start_time is None:
        return task
    attempt = AttemptRecord(start_time=task.start_time, end_time=task.end_time, nodes=task.nodes)
    return task.model_copy(update={"attempts": (attempt,)})


def time_use_in(run: RunRecord, task: TaskRecord) -> dict[str, float]:
    """How a task used its time, as `collect` finds it in the files that are there now."""
    if task.start_time is None and not task.number:
        task = task.model_copy(update={"start_time": run.start_time, "end_time": run.end_time})
    task = with_attempt(task)
    folder = task.folder_in(run.directory)
    records = Records()
    for block in MetricFiles(folder).blocks():
        records.add(block)
    return find_time_use(run, task, TimeEvidence.of(folder, task).with_records(records))
