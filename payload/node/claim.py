"""The jobs of `submit --first`, of which a single job runs its program.

The file first.json in the folder of each job names a file beside that folder, the claim, which all
these jobs on the cluster share. It is created once and never changed. It has the id of the job that
may run, or nothing. Uses only the standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from payload.node import task
from payload.node.requeue import JobEvents

POLL_S = 0.5
# The exit status if the job can't cancel itself.
LOST = 125


def end_unless_first(events: JobEvents) -> int | None:
    """Return None if this job may run its program. Otherwise cancel the job, and return its exit
    status.

    On several clusters, clusterctl writes the claim. If it does not, the job gives up, and no job
    on this cluster runs.
    """
    try:
        with open("first.json") as file:
            settings = json.load(file)
    except FileNotFoundError:
        return None
    claim = f"../.{settings['claim']}"
    job = os.environ["SLURM_JOB_ID"]
    deadline = time.monotonic() + settings["wait_s"]
    while settings["wait_s"] and not os.path.exists(claim) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    owner = create_or_read(claim, "" if settings["wait_s"] else job)
    if owner == job:
        return None
    if owner:
        task.complain(f"job {owner} of `submit --first` has started, so this job ends")
    else:
        task.complain(
            f"clusterctl did not choose a job of `submit --first` in {settings['wait_s']} s"
        )
    events.add("not-first", owner=owner)
    task.output_of(["scancel", job])
    return LOST


def create_or_read(claim: str, owner: str) -> str:
    """Create a claim with this content, unless it exists. Return its content."""
    new = f"{claim}.{os.environ['SLURM_JOB_ID']}"
    with open(new, "w") as file:
        file.write(owner)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(new, claim)
    os.unlink(new)
    with open(claim) as file:
        return file.read().strip()
