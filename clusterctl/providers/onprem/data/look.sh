#!/bin/sh
# Says what a machine has of clusterctl, whose account there is called $1: as any user, without our programs
# or records. Local clusters have a folder of their own there.
getent passwd "$1" >/dev/null && echo "the account $1"
find /etc /opt /usr/local /var/lib /var/log -xdev -name '*clusterctl*' ! -name '*.clusterctl-kept*' \
    ! -path /var/lib/clusterctl -prune -print 2>/dev/null
grep -ls clusterctl /etc/hosts /etc/fstab /etc/exports /etc/slurm/*.conf 2>/dev/null |
    sed 's/$/: lines of ours/'
exit 0
