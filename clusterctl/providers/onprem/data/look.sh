#!/bin/sh
# Lists the traces of clusterctl on a machine. Any user can run this script, and no clusterctl program is needed. The folder /var/lib/clusterctl belongs to local clusters.
find /etc /opt /usr/local /var/lib /var/log -xdev -name '*clusterctl*' ! -name '*.before-clusterctl*' \
    ! -path /var/lib/clusterctl -prune -print 2>/dev/null
grep -ls clusterctl /etc/hosts /etc/fstab 2>/dev/null |
    sed 's/$/: lines from clusterctl/'
exit 0
