#!/bin/sh
# Runs Slurm's accounting while an image is built, without systemd. `start` starts MariaDB and munge with a temporary
# key; `slurmdbd` starts slurmdbd, which creates its tables; `stop` stops all three and deletes their logs.
# slurmdbd runs in a network namespace of its own. In the network of the build machine, other hosts could reach it, and it
# would not start while the machine has no address. $mine/sacctmgr, first in the PATH of the tasks, enters the namespace.
set -eu
# The folder disappears with the build machine.
mine=/run/clusterctl-accounting

# Repeat a command until it succeeds, for at most 30 s.
within() {
    tries=600
    until "$@"; do
        tries=$((tries - 1))
        if [ "$tries" -eq 0 ]; then
            echo "not ready after 30 s: $*" >&2
            tail -n 20 "$mine"/*.log /var/log/slurm/slurmdbd.log >&2 || true
            exit 1
        fi
        sleep 0.05
    done
}

ended() { ! kill -0 "$(cat "$mine/$1.pid")" 2>/dev/null; }

# Start a daemon: its name, then its command.
background() {
    name=$1
    shift
    setsid "$@" >"$mine/$name.log" 2>&1 </dev/null &
    echo $! >"$mine/$name.pid"
}

case $1 in
start)
    mkdir -m 0755 "$mine"
    install -d -o munge -g munge /run/munge
    install -d -o mysql -g mysql /run/mysqld
    install -m 0400 -o munge -g munge /dev/null "$mine/munge.key"
    head -c 1024 /dev/urandom >"$mine/munge.key"
    background mariadb mariadbd --user=mysql
    background munge runuser -u munge -- munged --foreground --force --key-file="$mine/munge.key" \
        --seed-file=/run/munge/seed --pid-file=/run/munge/pid --log-file=/run/munge/log
    within test -S /run/munge/munge.socket.2
    within mariadb-admin --silent ping
    # The shell of sacctmgr expands the pid.
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nexec nsenter --net="/proc/$(cat %s/slurmdbd.pid)/ns/net" /usr/bin/sacctmgr "$@"\n' "$mine" \
        >"$mine/sacctmgr"
    chmod 0755 "$mine/sacctmgr"
    ;;
slurmdbd)
    port=$(sed -n 's/^DbdPort=//p' /etc/slurm/slurmdbd.conf)
    background slurmdbd unshare --net sh -c \
        'ip link set lo up && ip address add 192.0.2.1/32 dev lo && exec slurmdbd -D'
    within nsenter --net="/proc/$(cat "$mine/slurmdbd.pid")/ns/net" sh -c "ss -Hltn 'sport = :$port' | grep -q ."
    ;;
stop)
    kill "$(cat "$mine/slurmdbd.pid")"
    within ended slurmdbd
    # Between the build and the start of a cluster there is no usage for slurmdbd to sum up, and no one's transactions.
    mariadb --batch --skip-column-names --execute="SELECT CONCAT('DELETE FROM \`', table_name, '\`;')
        FROM information_schema.tables WHERE table_schema = 'slurm_acct_db'
        AND (table_name LIKE '%last_ran_table' OR table_name = 'txn_table')" |
        mariadb slurm_acct_db
    # The shutdown writes all data to the files.
    mariadb-admin shutdown
    within ended mariadb
    kill "$(cat "$mine/munge.pid")"
    rm -f /var/log/slurm/* /var/lib/munge/*
    ;;
esac
