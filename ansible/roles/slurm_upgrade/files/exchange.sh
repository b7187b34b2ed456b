#!/bin/bash
# exchange.sh controller|node new|old: exchange Slurm's packages on this host, and restart its daemons.
#
# Runs as a unit of systemd, to its end whatever becomes of who started it; run again, it goes on: `going` is there
# until it has ended well. Beside it lie the packages, new/ and old/, and on the controller the accounting and
# slurmctld's state from before: backup/ of an exchange that goes on, kept/ of the last that ended, for the way back.
# Where a step fails, what was before runs again; the file `why` says which one, and in how far.
# shellcheck disable=SC2317  # the steps are called by their names
set -Eeuo pipefail
role=$1 way=$2
cd "$(dirname "$0")"
exec 9>lock
flock 9
exec >>log 2>&1
echo "== $(date --iso-8601=seconds) $role $way"
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
database=slurm_acct_db
state=/var/lib/slurm/slurmctld
policy=/usr/sbin/policy-rc.d
patience_s=1800 # for slurmdbd, which converts its tables
rm -f why

step() {
    echo "$1" >step
    echo "-- $1"
}

# Daemons are restarted below, in their order, not by their packages.
hold_daemons() {
    [[ -e $policy ]] && return
    printf '#!/bin/sh\n# clusterctl\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

release_daemons() {
    if [[ -e $policy ]] && grep -qx '# clusterctl' "$policy"; then rm -f "$policy"; fi
}
trap release_daemons EXIT

install_packages() { # new|old
    hold_daemons
    dpkg --configure --pending || true # what an interrupted one left; apt says what is wrong
    apt-get install --yes --no-install-recommends --allow-downgrades \
        -o Dpkg::Options::=--force-confold -o DPkg::Lock::Timeout=300 ./"$1"/*.deb
    release_daemons
    systemctl daemon-reload
}

runs() { systemctl is-active --quiet "$1"; }

# Whether a daemon runs whose program was exchanged meanwhile.
stale() { [[ $(readlink "/proc/$(systemctl show -P MainPID "$1")/exe") == *' (deleted)' ]]; }

start() { # UNIT PORT
    systemctl reset-failed "$1" || true
    systemctl restart --no-block "$1"
    local end=$((SECONDS + patience_s))
    until [[ -n $(ss -Hltn "sport = :$2") ]] && runs "$1" && ! stale "$1"; do
        if systemctl is-failed --quiet "$1" || (($(systemctl show -P NRestarts "$1") > 2 || SECONDS >= end)); then
            journalctl --unit "$1" --lines=5 --no-pager --output=cat
            return 1
        fi
        sleep 0.1
    done
}

back_up() {
    rm -rf backup
    mkdir -m 700 backup
    mariadb-dump --single-transaction --routines "$database" >backup/accounting.sql
    tar -C "$state" -cf backup/state.tar .
    date --iso-8601=seconds >backup/done
    sync backup/accounting.sql backup/state.tar backup/done
}

# What `restoring` shows was begun is done again: half of it is worse than none.
restore_backup() {
    [[ -e backup/done ]] || return 0
    touch backup/restoring
    sync backup/restoring
    mariadb -e "drop database if exists $database; create database $database"
    mariadb "$database" <backup/accounting.sql
    find "$state" -mindepth 1 -delete
    tar -C "$state" -xf backup/state.tar
    sync "$state"
    rm -rf backup
}

# What runs under the newer slurmd, an older one could not end. The state that is brought back knows nothing of this.
end_jobs() {
    local job jobs partition partitions
    runs slurmctld || return 0
    partitions=$(sinfo --all --noheader --format=%R)
    for partition in $partitions; do
        scontrol update partitionname="$partition" state=inactive
    done
    jobs=$(squeue --all --noheader --states=running,suspended --format=%A)
    for job in $jobs; do
        scontrol requeue "$job" || scancel "$job"
    done
    for _ in {1..240}; do
        jobs=$(squeue --all --noheader --states=running,suspended,completing)
        [[ -n $jobs ]] || return 0
        sleep 0.5
    done
    for partition in $partitions; do
        scontrol update partitionname="$partition" state=up
    done
    echo "jobs do not end: ${jobs//$'\n'/; }"
    return 1
}

to_new_controller() {
    if [[ -e backup/restoring ]]; then
        step 'bringing back the accounting and the state of slurmctld'
        systemctl stop slurmctld slurmdbd
        restore_backup
    fi
    if [[ -e backup/returning ]]; then # a way back that was given up before it changed anything
        rm -rf kept backup/returning
        mv backup kept
    fi
    step 'installing the packages'
    install_packages new
    [[ -n $configured ]] || return 0
    if [[ -n $changes && ! -e backup/done ]]; then
        step 'stopping slurmctld and slurmdbd'
        systemctl stop slurmctld slurmdbd
        step 'copying the accounting and the state of slurmctld'
        back_up
    fi
    step 'starting slurmdbd'
    if ! runs slurmdbd || stale slurmdbd; then start slurmdbd 6819; fi
    step 'starting slurmctld'
    if ! runs slurmctld || stale slurmctld; then start slurmctld 6817; fi
    scontrol ping | grep UP
    if [[ -e backup/done ]]; then
        rm -rf kept
        mv backup kept
    fi
}

to_old_controller() {
    step 'looking for the copy of the accounting and the state of slurmctld'
    if [[ -n $configured && ! -e backup/done ]]; then
        if [[ ! -e kept/done ]]; then
            echo 'there is none from before the upgrade: this cluster was made with the newer Slurm'
            return 1
        fi
        touch kept/returning
        mv kept backup
    fi
    step 'ending running jobs'
    [[ -e backup/restoring ]] || end_jobs
    bring_back_controller
}

bring_back_controller() {
    step 'stopping slurmctld and slurmdbd'
    systemctl stop slurmctld slurmdbd
    step 'installing the former packages'
    install_packages old
    [[ -n $configured ]] || return 0
    step 'bringing back the accounting and the state of slurmctld'
    restore_backup
    step 'starting the former slurmdbd'
    start slurmdbd 6819
    step 'starting the former slurmctld'
    start slurmctld 6817
}

to_new_node() {
    step 'installing the packages'
    install_packages new
    [[ -n $configured ]] || return 0
    step 'starting slurmd'
    if ! runs slurmd || stale slurmd; then start slurmd 6818; fi
}

to_old_node() { bring_back_node; }

bring_back_node() {
    step 'installing the former packages'
    install_packages old
    step 'starting the former slurmd'
    [[ -z $configured ]] || start slurmd 6818
}

# A host that is about to join has the packages, and no daemon of the cluster yet.
case $role in
controller) configured=$(systemctl is-enabled slurmctld 2>/dev/null | grep -x enabled || true) ;;
node) configured=$(systemctl is-enabled slurmd 2>/dev/null | grep -x enabled || true) ;;
esac

# As a command of its own alone: bash forgets about `set -e` where a status is looked at.
try() { # FUNCTION: leaves its status in rc
    set +e
    (
        set -e
        "$1"
    )
    rc=$?
    set -e
}

said() { echo "$(<step) failed: $(grep -v '^--' log | tail -n 3 | tr '\n' ' ')"; }

# What is exchanged already needs no copy, and nothing to go back to: its daemons are started, no more.
changes=$way
installed=$(dpkg-query --show --showformat '${Version}' slurm-client || true)
if [[ $way == new && ! -e going && $(dpkg-deb --field new/slurm-client_*.deb Version) == "$installed" ]]; then
    changes=
fi
touch going
sync going
try "to_${way}_$role"
if ((!rc)); then
    rm going
    exit 0
fi
said >why.part
if [[ $changes == new ]]; then
    try "bring_back_$role"
    if ((rc)); then
        echo "going back: $(said)" >>why.part
    else
        echo "the former Slurm runs again" >>why.part
        rm going
    fi
fi
mv why.part why
exit 1
