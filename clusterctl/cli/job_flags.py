"""The options that describe a job, which several verbs have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from clusterctl.cli.options import launchers, partitions

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the sbatch script; submit nothing.")]
Follow = Annotated[bool, typer.Option("--follow", help="Show its output until it has ended.")]
Timeout = Annotated[str | None, typer.Option(help="Longest wait, such as 10m; the job goes on after it.")]


def _flag(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    """An option that is None unless it is given."""
    return Annotated[kind | None, typer.Option(*names, help=text, **settings)]


# Each is a field of JobOptions, which says what it may be.
JOB_FLAGS: Final[Mapping[str, Any]] = {
    "nodes": _flag(int, "Nodes. Default: 1.", "--nodes", "-N"),
    "tasks_per_node": _flag(int, "Tasks (ranks) per node. Default: 1; bundled jobs: one per GPU."),
    "cpus": _flag(int, "CPU cores per task."),
    "gpus": _flag(int, "GPUs per node. Default for bundled jobs: all; probe, export: none."),
    "mem": _flag(str, "Memory per node, such as 4GiB."),
    "time": _flag(str, "Time limit, such as 30m or 1:30:00."),
    "name": _flag(str, "Job name. Default: the job's or the script's."),
    "partition": _flag(str, "Partition. Default: the first.", "--partition", "-p", autocompletion=partitions),
    "account": _flag(str, "Slurm account.", "--account", "-A"),
    "qos": _flag(str, "Quality of service.", "--qos", "-q"),
    "constraint": _flag(str, "Node features.", "--constraint", "-C"),
    "array": _flag(str, "Array of jobs, such as 1-10%2.", "--array", "-a"),
    "sweep": _flag(
        list[str],
        "An array whose tasks try all values of an option of the program. Repeatable: all combinations.",
        metavar="KEY=V,V|A..B",
    ),
    "signal": _flag(str, "Signal sent before the time limit, such as USR1@120 (seconds)."),
    "requeue": _flag(bool, "Requeue, in the same folder, when the program exits with 75.", "--requeue"),
    "launcher": _flag(
        str, "Launcher of the ranks: srun (PMIx, the default), mpirun or torchrun.", autocompletion=launchers
    ),
    "include": _flag(
        list[str], "Also copy this, even if .gitignore excludes it. Repeatable.", metavar="PATTERN"
    ),
    "exclude": _flag(list[str], "Do not copy this from the script's folder. Repeatable.", metavar="PATTERN"),
    "folder": _flag(bool, "Copy the script's folder to the cluster. Default: yes.", "--folder/--no-folder"),
    "outputs": _flag(list[str], "Pattern of files for `collect`, such as 'results/**'. Repeatable."),
    "env": _flag(list[str], "Environment variable K=V; K alone takes its value from here. Repeatable."),
    "requirements": _flag(Path, "Requirements file for the program's Python environment."),
    "container": _flag(str, "Run in this Apptainer image (.sif), on the cluster or here."),
    "tag": _flag(list[str], "A word to find the run by, see `clusterctl runs`. Repeatable."),
    "note": _flag(str, "A remark about the run."),
}
# Slurm's names of some of these options. The help does not list them.
SLURM_FLAGS: Final[Mapping[str, Any]] = {
    "tasks_per_node": _flag(int, "--tasks-per-node.", "--ntasks-per-node", hidden=True),
    "cpus": _flag(int, "--cpus.", "--cpus-per-task", "-c", hidden=True),
    "gpus": _flag(int, "--gpus.", "--gpus-per-node", hidden=True),
    "time": _flag(str, "--time.", "-t", hidden=True),
    "name": _flag(str, "--name.", "--job-name", "-J", hidden=True),
}


def some_flags(names: str) -> Mapping[str, Any]:
    """Return the options of these names, which are separated by spaces."""
    return {name: JOB_FLAGS[name] for name in names.split()}
