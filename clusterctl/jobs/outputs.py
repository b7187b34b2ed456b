"""What of a job's folder is brought home: written down beside the job, where any clusterctl finds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from clusterctl.jobs.ignore import patterns
from clusterctl.spec.job import JobSpec

OUTPUTS_FILE = "outputs.json"

_SPECIAL, _ESCAPED = re.compile(r"([\\*?\[\]!# ])"), r"\\\1"


def outputs_file(job: JobSpec) -> dict[str, bytes]:
    """outputs.json, if the job says what its outputs are: patterns, of which the last that matches counts.

    Our own files are always brought home, and so is the script. The job can change the file: it is read with
    care, and its patterns are matched as such (see collect/remote_globs.py), never made into expressions.

    Raises:
        UsageError: a pattern can't be understood.
    """
    if not job.outputs:
        return {}
    script = [f"/{_SPECIAL.sub(_ESCAPED, job.script.name)}"] if job.script is not None else []
    patterns("--outputs", job.outputs, Path())  # says which can't be understood
    said = {"version": 2, "patterns": [*job.outputs, *script]}
    return {OUTPUTS_FILE: (json.dumps(said, indent=1) + "\n").encode()}
