#!/bin/sh
# The packages of a site, and what its administrators set up on all hosts. In a chroot. Arguments: the module of
# Open MPI, the packages. By /usr/share/doc/slurmctld/README.Debian and the documentation of the packages.
set -eu
module=$1
shift
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o Acquire::Languages=none update
apt-get -qq -y -o Dpkg::Options::=--force-unsafe-io -o Dpkg::Options::=--force-confold install --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/*
# Which host runs which service is known when the hosts are.
for unit in slurmctld slurmd slurmdbd mariadb; do
    systemctl disable --quiet "$unit" 2>/dev/null || true
done
for unit in getty.target man-db.timer systemd-pstore.service; do
    systemctl mask --quiet "$unit"
done
groupadd --gid 3000 students
useradd --no-create-home --uid 3001 --gid students --shell /bin/bash stud
useradd --no-create-home --uid 3002 --gid students --shell /bin/tcsh carla
useradd --no-create-home --uid 3003 --gid students --shell /usr/bin/fish finn
echo 'session optional pam_umask.so umask=077' >>/etc/pam.d/common-session
# The programs and the library of Open MPI are found only by those who load the module.
mkdir -p "/opt/site/$module/bin" "/opt/site/$module/lib"
for program in mpirun mpiexec; do
    ln -s "/usr/bin/$program.openmpi" "/opt/site/$module/bin/$program"
    rm -f "/usr/bin/$program"
done
mv /usr/lib/*-linux-gnu/libmpi.so.40* "/opt/site/$module/lib/"
mkdir -p /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm
chown -R slurm: /var/lib/slurm /var/log/slurm
