"""Show where the ranks of a running job are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.errors import SchedulerError
from clusterctl.jobs.queue import running_job
from clusterctl.jobs.watch import folder_of
from clusterctl.scheduler.session import Session

# The job's script names the Python and the payload that the job uses.
_SHOW: Final = """\
. <(grep -E '^(python|payload)=' "$1/$2") && exec \
"$python" -IS "$payload"/payload/node/hang.py show "${@:3}\""""


@dataclass(frozen=True, slots=True)
class JobStacks:
    """Where the ranks of a job are: in words, for each group of ranks at the same place, and for
    each rank.

    ranks: the fields of ``RankStacks`` in payload/node/stacks.py.
    """

    job_id: str
    groups: tuple[str, ...]
    ranks: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the stacks as `-o json` shows them."""
        return {"job_id": self.job_id, "groups": list(self.groups), "ranks": list(self.ranks)}


def stacks_of(session: Session, job_id: str) -> JobStacks:
    """Read the stacks of a running job's ranks, and write them to rank-logs/RANK.stack in its folder.

    Raises:
        UsageError: the job is not running, or is an array.
        SchedulerError: the job is unknown, or a node did not answer.
    """
    job = running_job(session, job_id)
    folder = folder_of(session, job.id)
    task_folder = folder if job.task is None else f"{folder}/task-{job.task}"
    words = [
        folder,
        session.scheduler.script_name,
        task_folder,
        ",".join(job.nodes),
        session.site.rank_ssh,
    ]
    # The variable separates these processes from the job's ranks.
    argv = ["env", "CLUSTERCTL_WATCHER=1", "bash", "-c", _SHOW, "stacks", *words]
    result = session.scheduler.run_in_job(job, argv)
    try:
        answer = json.loads(result.stdout)
        ranks = tuple(rank for rank in answer["ranks"] if "rank" in rank)
        return JobStacks(job.id, tuple(map(str, answer["groups"])), ranks)
    except (ValueError, LookupError, TypeError) as exc:
        raise SchedulerError(
            f"the nodes of job {job_id} did not tell where its ranks are",
            code="tool-failed",
            about="stacks",
            where=job.nodes[0],
            why=(result.stderr.strip().splitlines() or ["no answer"])[-1],
            fix="`clusterctl status` shows the state of the nodes",
        ) from exc
