#!/bin/sh
# Lists the traces of clusterctl on a machine; $1 is the name of its account. Any user can run this script, and
# no clusterctl program is needed. The folder /var/lib/clusterctl belongs to local clusters.
getent passwd "$1" >/dev/null && echo "the account $1"
find /etc /opt /usr/local /var/lib /var/log -xdev -name '*clusterctl*' ! -name '*.before-clusterctl*' \
    ! -path /var/lib/clusterctl -prune -print 2>/dev/null
grep -ls clusterctl /etc/hosts /etc/fstab 2>/dev/null |
    sed 's/$/: lines from clusterctl/'
exit 0
