#!/bin/bash
# exchange.sh controller|node new|old: exchange Slurm's packages on this host, and restart its daemons.
#
# Runs as a unit of systemd, to its end whatever becomes of who started it. `going` is there until it has ended well:
# killed or without power in between, it goes on when it is run again, or goes back when it is run the other way.
# Beside it lie the packages, new/ and old/, and on the controller the accounting and slurmctld's state from before:
# backup/ of an exchange that goes on, kept/ of the last that ended, for the way back. Each is whole, or not there.
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
held=$PWD/held            # no boot starts the daemons while it is there
starting=/run/${PWD##*/} # though held they are started by this program, in this boot
patience_s=1800 # for slurmdbd, which converts its tables
rm -f why

step() {
    echo "$1" >step
    echo "-- $1"
}

# Daemons are restarted below, in their order, not by their packages; nor by a boot, which would let those of the
# newer release convert data of which there is no copy yet.
hold_daemons() {
    local unit
    for unit in slurmdbd slurmctld; do
        [[ $role == controller ]] || break
        mkdir -p "/etc/systemd/system/$unit.service.d"
        printf '[Unit]\nConditionPathExists=|%s\nConditionPathExists=|%s\n' "!$held" "$starting" \
            >"/etc/systemd/system/$unit.service.d/clusterctl-exchange.conf"
    done
    touch "$held"
    sync -f "$held" /etc
    [[ -e $policy ]] && return
    printf '#!/bin/sh\n# clusterctl\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

release_packages() {
    if [[ -e $policy ]] && grep -qx '# clusterctl' "$policy"; then rm -f "$policy"; fi
}

release_daemons() {
    local unit
    rm -f "$held" "$starting"
    for unit in slurmdbd slurmctld; do
        rm -f "/etc/systemd/system/$unit.service.d/clusterctl-exchange.conf"
        rmdir --ignore-fail-on-non-empty "/etc/systemd/system/$unit.service.d" 2>/dev/null || true
    done
    systemctl daemon-reload
}
trap release_packages EXIT

# apt touches nothing while packages are half installed, as a dpkg that was killed leaves them. dpkg takes them all at
# once: those of this way, and those that only the newer release has, which may have been cut off, too.
install_packages() { # new|old
    local file files=(./"$1"/*.deb)
    hold_daemons
    if [[ -n $(dpkg --audit) || -n $(ls /var/lib/dpkg/updates) ]]; then
        for file in ./new/*.deb; do
            compgen -G "./$1/$(basename "${file%%_*}")_*" >/dev/null || files+=("$file")
        done
        dpkg --force-confold --no-force-unsafe-io --auto-deconfigure --install "${files[@]}"
    fi
    apt-get install --yes --no-install-recommends --allow-downgrades -o Dpkg::Options::=--force-confold \
        -o Dpkg::Options::=--no-force-unsafe-io -o DPkg::Lock::Timeout=300 ./"$1"/*.deb
    release_packages
    systemctl daemon-reload
}

runs() { systemctl is-active --quiet "$1"; }

# Whether a daemon runs whose program was exchanged meanwhile.
stale() { [[ $(readlink "/proc/$(systemctl show -P MainPID "$1")/exe") == *' (deleted)' ]]; }

start() { # UNIT PORT [TIMES]: how often it may be restarted before that counts as a failure
    touch "$starting"
    systemctl reset-failed "$1" || true
    systemctl restart --no-block "$1"
    local end=$((SECONDS + patience_s))
    until [[ -n $(ss -Hltn "sport = :$2") ]] && runs "$1" && ! stale "$1"; do
        if systemctl is-failed --quiet "$1" || (($(systemctl show -P NRestarts "$1") > ${3-2} || SECONDS >= end)); then
            journalctl --unit "$1" --lines=5 --no-pager --output=cat
            return 1
        fi
        sleep 0.1
    done
}

back_up() {
    rm -rf backup.part
    mkdir -m 700 backup.part
    mariadb-dump --single-transaction --routines "$database" >backup.part/accounting.sql
    tail -n 1 backup.part/accounting.sql | grep '^-- Dump completed'
    tar -C "$state" -cf backup.part/state.tar .
    sync -f backup.part
    mv backup.part backup
    sync -f backup
}

restore_accounting() {
    mariadb -e "drop database if exists $database; create database $database"
    mariadb "$database" <backup/accounting.sql
}

# What `restoring` shows was begun is done again: half of it is worse than none.
restore_backup() {
    [[ -e backup ]] || return 0
    touch backup/restoring
    sync -f backup
    restore_accounting
    find "$state" -mindepth 1 -delete
    tar -C "$state" -xf backup/state.tar
    rm -rf restored
    sync -f "$state"
    mv backup restored
    sync -f .
}

open_partitions() {
    local partition
    [[ -e closed ]] || return 0
    for partition in $(<closed); do
        scontrol update partitionname="$partition" state=up
    done
    rm closed
}

# What runs under the newer slurmd, an older one could not end. The state that is brought back knows nothing of this.
end_jobs() {
    local job jobs partition partitions
    runs slurmctld || return 0
    partitions=$(scontrol --oneliner show partition | sed -n 's/^PartitionName=\([^ ]*\) .* State=UP .*/\1/p')
    printf '%s\n' "$partitions" >>closed
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
    open_partitions
    echo "jobs do not end: ${jobs//$'\n'/; }"
    return 1
}

to_new_controller() {
    if [[ -e backup/restoring ]]; then
        step 'bringing back the accounting and the state of slurmctld'
        systemctl stop slurmctld slurmdbd
        restore_backup
    elif [[ -e backup/returning ]]; then # a way back that was given up before it changed anything
        rm -rf kept
        mv backup kept
        rm kept/returning
    fi
    step 'installing the packages'
    install_packages new
    [[ -n $configured ]] || return 0
    if [[ $changes == new && ! -e backup && ! -e kept ]]; then
        step 'stopping slurmctld and slurmdbd'
        systemctl stop slurmctld slurmdbd
        step 'copying the accounting and the state of slurmctld'
        back_up
    fi
    step 'starting slurmdbd'
    if [[ -e backup && ! -e backup/converted ]]; then
        systemctl stop slurmctld slurmdbd
        if [[ -e backup/converting ]]; then restore_accounting; fi # half converted
        touch backup/converting
        sync -f backup
        start slurmdbd 6819 0
        touch backup/converted
    elif ! runs slurmdbd || stale slurmdbd; then
        start slurmdbd 6819
    fi
    step 'starting slurmctld'
    [[ ! -e backup ]] || touch backup/served
    if ! runs slurmctld || stale slurmctld; then start slurmctld 6817; fi
    scontrol ping | grep UP
    open_partitions
    if [[ -e backup ]]; then
        rm -rf kept
        mv backup kept
    fi
}

to_old_controller() {
    if [[ -e kept ]]; then
        touch kept/returning
        mv kept backup
    fi
    step 'ending running jobs'
    [[ ! -e backup || -e backup/restoring ]] || end_jobs
    bring_back_controller
    rm -f closed # the state that was brought back has them open
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

ended() {
    release_daemons
    rm -f node going
}

said() { echo "$(<step) failed: $(grep -v '^--' log | tail -n 3 | tr '\n' ' ')"; }

# `going` says what the exchange that has not ended is: new, old, or the same packages, whose daemons are started. Of
# the former two without backup and kept, no daemon of the newer release has seen the data.
was=$(cat going 2>/dev/null || true)
changes=$way
case $way in
new)
    installed=$(dpkg-query --show --showformat '${Version}' slurm-client || true)
    if [[ ! $was =~ new|old ]]; then
        brought=$(dpkg-deb --field new/slurm-client_*.deb Version | cut -d. -f1,2)
        if [[ $installed == "$brought".* ]]; then changes=same; else rm -rf kept; fi
    fi
    ;;
old)
    if [[ $role == controller && -n $configured && ! -e backup && ! -e kept && ! $was =~ new|old ]]; then
        echo 'no copy of accounting and queue is here from before: this cluster was made with the newer Slurm' >why
        exit 1
    fi
    ;;
esac
# For the probe, where slurmd does not start.
if [[ $role == node && -z $was ]] && slurmd -C >node.part; then mv node.part node; fi
echo "$changes" >going.part
mv going.part going
sync -f going
try "to_${way}_$role"
if ((!rc)); then
    ended
    exit 0
fi
said >why.part
if [[ $changes == new && ! -e kept ]]; then
    rm -f backup/served # no job was ended
    try "bring_back_$role"
    if ((rc)); then
        echo "going back: $(said)" >>why.part
    else
        echo "the former Slurm runs again" >>why.part
        ended
    fi
fi
mv why.part why
exit 1
