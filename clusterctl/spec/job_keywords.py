"""The options of a job as keyword arguments, for the Python interface.

Written by scripts/job_keywords.py from JobOptions: `make reference` after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class ReplayKeywords(TypedDict, total=False):
    """The options of `replay`."""

    # Memory per node, such as 4GiB.
    mem: int | str
    # Time limit, such as 30m or 1:30:00. A bare number is minutes.
    time: int | str
    # Partition. Default: the first.
    partition: str
    # Slurm account.
    account: str
    # Quality of service.
    qos: str
    # Required node features.
    constraint: str
    # Slurm reservation.
    reservation: str
    # Licenses that Slurm counts, such as matlab:2.
    licenses: str
    # Environment variable that only the ranks get, with the content of FILE. NAME alone passes your
    # current value. Nothing records the value.
    secret: Mapping[str, str] | Sequence[str]
    # Tag for finding the run with `clusterctl runs`.
    tag: Sequence[str]
    # A remark about the run.
    note: str


class JobKeywords(ReplayKeywords, total=False):
    """The options of `submit`."""

    # Job name. Default: the name in the script's #SBATCH lines, or else that of the script or
    # bundled job.
    name: str
    # Number of nodes. Default: 1.
    nodes: int
    # Tasks (ranks) per node. Default: 1; for bundled jobs: number of GPUs.
    tasks_per_node: int
    # Ranks that mpirun starts; the other tasks are for MPI_Comm_spawn. Default: all.
    ranks: int
    # CPU cores per task.
    cpus: int
    # GPUs per node. Default: 0; for bundled jobs except probe and export: all.
    gpus: int
    # Submit a job array, such as 1-10%2.
    array: str
    # Run one task per value of an option. KEY=V,V, KEY=A..B, or FILE.csv, a table with a task per
    # line. Repeat it for all combinations.
    sweep: Mapping[str, Any] | Sequence[str]
    # Run the tasks of the array or sweep inside a single job, as many at a time as fit: for many
    # short tasks.
    pack: bool
    # Run the job on each of these numbers of nodes. KIND: nodes, tasks or gpus (per node). For a
    # table of speed-up and efficiency.
    scaling: Mapping[str, Any]
    # Start after this job has ended. END: ok (successfully, the default), any or notok. Or
    # singleton: after your earlier jobs with the same name. The files of the jobs are in
    # $CLUSTERCTL_AFTER_1, _2, ...
    after: Sequence[str]
    # Another option of sbatch. Such as '--exclude=NODE'.
    slurm: Sequence[str]
    # Continue an earlier run. RUN: its folder, its name in ./runs, or its job ID; its files are in
    # $CLUSTERCTL_FROM_RUN.
    from_run: str
    # Also requeue after failures and the time limit, not only after the loss of a node. Default for
    # train: with --save-interval.
    requeue: bool
    # Signal for the program before the time limit, such as USR1@120 (seconds).
    signal: str
    # Requeue the job at its time limits, such as --time 4h, until it has run 7d in total.
    chain: int | str
    # Launcher of the ranks: srun (PMIx, the default), mpirun or torchrun.
    launcher: str
    # If the job makes no progress for SECONDS: warn, end the program, or off. Default: warn@600;
    # for train: end@600.
    hang: str
    # What to do if GPUs are idle, steps wait for data, GPUs are slowed down, or memory or a disk is
    # nearly full. Default: warn.
    alarm: Sequence[str]
    # Send files that git ignores. PATTERN is as in .gitignore.
    include: Sequence[str]
    # Do not send files matching PATTERN.
    exclude: Sequence[str]
    # Send this folder with the script; none: only the script. Default: the nearest folder with a
    # project file, such as pyproject.toml or .git, or else the script's folder.
    folder: bool | str | Path
    # Pattern of files to collect, such as 'results/**'.
    outputs: Sequence[str]
    # Copy files to a disk of each node before the start, unless they are there from an earlier job.
    # SOURCE:TARGET:by-node shares a folder's files out among the nodes.
    stage: Sequence[str]
    # Environment variable K=V. K alone passes your current value of K.
    env: Mapping[str, str] | Sequence[str]
    # File that lists the Python packages. A requirements.txt, pyproject.toml, uv.lock, pylock.toml
    # or a script; none: no packages. Default: such a file beside a Python program.
    requirements: Literal[False] | str | Path
    # Run with the conda or virtual environment in this folder of the cluster, or with conda's
    # environment of this name there. It is not changed.
    env_path: str
    # Environment module to load on the nodes before the program, after the cluster's.
    module: Sequence[str]
    # Shell command that builds the program on the job's first node before it starts, such as 'make
    # -j4'. Jobs with the same files take the result.
    build: str
    # Run in this container image. docker://NAME:TAG, or a file, here or on the cluster.
    container: str
    # With --container: the path SOURCE of the nodes is TARGET in the container; without TARGET, it
    # has the same path there.
    mount: Sequence[str]
