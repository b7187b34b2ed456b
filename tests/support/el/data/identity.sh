#!/bin/sh -e
# In the same tree, once its packages are built: it stops being Debian, and becomes an EL-shaped node.
# usage: identity.sh PACKAGE.rpm...

# What dnf and rpm of Debian have otherwise than EL's.
mkdir -p /etc/rpm /etc/dnf/vars /etc/pki/rpm-gpg /etc/yum.repos.d /etc/sysconfig /etc/ld.so.conf.d
echo '%_dbpath /var/lib/rpm' >/etc/rpm/macros
cat >/etc/dnf/dnf.conf <<'EOF'
[main]
gpgcheck=1
installonly_limit=3
clean_requirements_on_remove=True
best=True
skip_if_unavailable=False
EOF
rm -rf /etc/dnf/plugins /usr/lib/python3/dist-packages/dnf-plugins
rm -f /etc/yum.repos.d/*
echo /usr/lib64 >/etc/ld.so.conf.d/lib64.conf

# Programs by EL's names and places; the platform's Python is 3.9 there, and 3.11 a package.
ln -sf dnf-3 /usr/bin/yum
mv /usr/bin/python3.11 /usr/bin/python3.9
ln -sf python3.9 /usr/bin/python3
ln -sf ../bin/python3.9 /usr/libexec/platform-python
rm -rf /usr/lib/python3.11/ensurepip /usr/share/python-wheels
ln -sf bash /usr/bin/sh
[ -e /usr/lib/systemd/system/sshd.service ] || ln -s ssh.service /usr/lib/systemd/system/sshd.service

echo "SetEnv PATH=/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin" >/etc/ssh/sshd_config.d/path.conf

# Accounts and groups as in EL. systemd would make Debian's again.
sed -i -E '/^[gu] +(sudo|uucp|adm|wheel|dialout) /d' /usr/lib/sysusers.d/*.conf
for name in sudo uucp; do
    groupdel "$name" 2>/dev/null || true
done
userdel uucp 2>/dev/null || true
getent group wheel >/dev/null || groupadd -g 10 wheel
rm -f /etc/sudoers.d/README
echo '%wheel ALL=(ALL) ALL' >/etc/sudoers.d/wheel && chmod 0440 /etc/sudoers.d/wheel

# The web as the machine knows it is played to it (tests/support/lab_web.py).
cp /quarry/ca.crt /usr/local/share/ca-certificates/lab.crt
update-ca-certificates >/dev/null
mkdir -p /etc/pki/tls/certs
ln -sf /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt

# Nothing of Debian's own may be found: who looks for it has lost its way.
rm -rf /etc/apt /etc/mysql /etc/debian_version /etc/default /etc/os-release /usr/lib/os-release /usr/bin/apt* \
    /usr/bin/dpkg* /var/lib/dpkg /var/lib/apt /var/cache/apt /usr/sbin/policy-rc.d /usr/lib/python3/dist-packages/apt \
    /usr/lib/python3/dist-packages/apt_*
ldconfig

rpm --initdb
rpm --import /quarry/keys/rocky
rpm -U --force-debian "$@" 2>/dev/null || rpm -U "$@"
ln -s ../../etc/os-release /usr/lib/os-release
rm -rf /quarry /tmp/* /var/cache/dnf /root/rpmbuild
