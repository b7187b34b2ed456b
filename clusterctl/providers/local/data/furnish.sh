#!/bin/sh
# Runs in a new base image: the admin user with sudo, and nothing that only slows a node's boot.
# Arguments: the user's id; the units that are masked, in one word; those that are enabled.
set -eu
groupadd --gid "$1" clusterctl
useradd --uid "$1" --gid "$1" --create-home --shell /bin/bash clusterctl
echo 'clusterctl ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/clusterctl
chmod 0440 /etc/sudoers.d/clusterctl
cd /home/clusterctl
mkdir -m 0700 .ssh
: >.ssh/authorized_keys
chmod 0600 .ssh/authorized_keys
chown -R clusterctl:clusterctl .ssh
rm -f /etc/ssh/ssh_host_*
: >/etc/machine-id
# Apptainer does not make images without this file.
: >/etc/resolv.conf
for unit in $2; do
    ln -s /dev/null "/etc/systemd/system/$unit"
done
# A clean power-off should not wait 90 s for a job's processes.
mkdir -p /etc/systemd/system.conf.d
printf '[Manager]\nDefaultTimeoutStopSec=5s\n' >/etc/systemd/system.conf.d/clusterctl.conf
shift 2
systemctl enable "$@"
