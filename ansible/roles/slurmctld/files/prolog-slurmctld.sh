#!/bin/sh
# What slurmctld runs before a job starts. A node that was out of reach may be given the same job again in the
# moment in which it answers; it is still ending the job's former start then, would call the new one a
# duplicate, and Slurm would drain the node and hold the job. So whoever starts again waits a little.
[ "${SLURM_JOB_RESTART_COUNT:-${SLURM_RESTART_COUNT:-0}}" -eq 0 ] || sleep 10
exit 0
