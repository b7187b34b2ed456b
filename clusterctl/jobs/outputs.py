"""What of a job's folder is brought home: written down beside the job, where any clusterctl finds it."""

from __future__ import annotations

import json
import re

from clusterctl.jobs.ignore import rules
from clusterctl.jobs.userscript import OURS
from clusterctl.spec import JobSpec

OUTPUTS_FILE = "outputs.json"

_SPECIAL = re.compile(r"([\\*?\[\]!# ])")


def outputs_file(job: JobSpec) -> dict[str, bytes]:
    """outputs.json, if the job says what its outputs are: the patterns, and what they mean as expressions.

    The program that lists a job's folder knows no patterns. Of the expressions, the last that matches counts;
    our own files are always brought home, and so is the script.

    Raises:
        UsageError: a pattern can't be understood.
    """
    if not job.outputs:
        return {}
    own = [f"/{name}" for name in sorted(OURS)] + ["/stdout-*.log", "/stderr-*.log"]
    if job.script is not None:
        own.append("/" + _SPECIAL.sub(r"\\\1", job.script.name))
    said = {"version": 1, "patterns": job.outputs, "rules": rules("--outputs", (*job.outputs, *own))}
    return {OUTPUTS_FILE: (json.dumps(said, indent=1) + "\n").encode()}
