#!/bin/sh -e
# On an EL-shaped machine: packs its tree into a package and adds a repository that has it. There Debian's programs lie
# beside EL's packages, which are mostly empty; a tree that dnf makes would be, too. Left out is what is this machine's
# own, systemd-networkd, which Rocky Linux lacks, and scripts of System V, which would start a second sshd.
cat >/srv/tree.spec <<'EOF'
%global debug_package %{nil}
%global __os_install_post %{nil}
%global _build_id_links none
%define _binary_payload w0.gzdio
%define _unpackaged_files_terminate_build 0
Name: systemd
Version: 252
Release: 99.el9
Summary: The programs of an EL-shaped machine
License: various
AutoReqProv: no
%description
For tests.
%install
mkdir -p %{buildroot}
cd /
tar -c --one-file-system --exclude=*systemd-networkd* --exclude=./etc/ssh/ssh_host_* --exclude=./etc/machine-id \
    --exclude=./etc/hostname --exclude=./etc/systemd/network/* --exclude=./etc/systemd/system/* \
    --exclude=./usr/local/* --exclude=./etc/init.d/* --exclude=./etc/rc?.d/* --exclude=./etc/yum.repos.d/* \
    --exclude=./srv/* --exclude=./opt/* --exclude=./home/* --exclude=./root/* \
    --exclude=./tmp/* --exclude=./shared --exclude=./proc/* --exclude=./sys/* --exclude=./dev/* --exclude=./run/* \
    --exclude=./var/lib/rpm --exclude=./var/lib/dnf --exclude=./var/lib/clusterctl --exclude=./var/cache \
    --exclude=./var/log . |
    tar -x -C %{buildroot}
cd %{buildroot}
# There sshd.service is no link.
rm usr/lib/systemd/system/sshd.service
mv usr/lib/systemd/system/ssh.service usr/lib/systemd/system/sshd.service
sed -i '/^Alias=/d' usr/lib/systemd/system/sshd.service
# rpm would take some letters for patterns.
find . -mindepth 1 -type d -printf '%%%%dir "/%%P"\n' -o -printf '"/%%P"\n' |
    grep -v '".*[][*?{}\ ()]' >/srv/tree.files
%files -f /srv/tree.files
EOF
: >/srv/tree.files
rpmbuild --quiet -bb --define '_rpmdir /srv/repo' --define '_topdir /srv/top' /srv/tree.spec
rm -rf /srv/top
dnf -q -y install createrepo_c
createrepo_c -q /srv/repo
printf '[tree]\nname=Tree\nbaseurl=file:///srv/repo\ngpgcheck=0\nskip_if_unavailable=1\n' >/etc/yum.repos.d/tree.repo
