#!/bin/sh
# slurmctld runs this before a job starts. A node that was unreachable may get the same job again at the
# moment at which it answers. It is then still ending the earlier start of the job, and would report a
# duplicate job, so that Slurm drains the node and holds the job. Therefore a restarted job waits a little.
[ "${SLURM_JOB_RESTART_COUNT:-${SLURM_RESTART_COUNT:-0}}" -eq 0 ] || sleep 10
exit 0
