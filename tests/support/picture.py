"""A Debian machine as a cluster could change it; two pictures are equal if `down` restored the machine.

Left out is what `down` leaves: kernel settings that are in force.
"""

from __future__ import annotations

from tests.support.nested import Host

# Everything that a cluster could change; the backups that useradd makes, and logs of packages, left out. Of a
# unit that is not there systemd knows for a moment that somebody asked for it: the ledger does, to be sure.
_LOOK = r"""
find /etc /usr/local /opt /srv /home /shared -xdev ! -name '*-' \
    -printf '%y %m %U:%G %p %l\n' | sort
find /etc /usr/local /opt /srv /home /shared -xdev -type f ! -name '*-' -exec sha256sum {} + | sort -k2
dpkg-query -W -f '${db:Status-Status} ${binary:Package} ${Version}\n'
apt-mark showauto
systemctl list-unit-files --no-legend --no-pager | grep -v ^run-
systemctl list-units --no-legend --no-pager --plain --type=service --all |
    awk '$2 != "not-found" || $3 != "inactive" {print $1}' | grep -v '^run-\|^user\|^session'
getent passwd; getent group
ls /var/lib /var/spool /opt /; cut -d' ' -f5 /proc/self/mountinfo | sort
"""


def picture(host: Host) -> list[str]:
    """What it looks like, line by line. It must have a folder /shared."""
    return host.sh(_LOOK).splitlines()
