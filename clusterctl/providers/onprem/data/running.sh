#!/bin/sh
# Lists the daemons and jobs of the cluster that a machine belongs to. Any user can run this script. Jobs are those
# of squeue if slurmctld runs here and the user may see them, otherwise those that have processes here.
jobs() {
    systemctl is-active --quiet slurmctld &&
        timeout 10 squeue --noheader --format='job %i (%j) of %u is %T'
}
steps() {
    ps -e -o args= | sed -n 's/^slurmstepd: \[\([0-9]*\)\.batch\].*/job \1 has processes/p' | sort -u
}
# A cluster without a scheduler starts this program for each job, too.
programs() {
    ps -e -o user:32=,args= | sed -n 's/^\([^ ]*\) .*payload\/node\/job\.py run.*/a job of \1 has processes/p' | sort
}
{
    for unit in slurmctld slurmd; do
        systemctl is-active --quiet "$unit" && echo "$unit runs"
    done
    for list in jobs steps programs; do
        lines=$($list)
        [ -z "$lines" ] || { echo "$lines" && break; }
    done
} 2>/dev/null
exit 0
