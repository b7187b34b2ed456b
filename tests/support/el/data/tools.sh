#!/bin/sh -e
# In a bare Debian: installs the machinery of an EL-shaped node, and lays out in /quarry what its packages will hold.
# usage: tools.sh "TOOL..." "PAYLOAD PACKAGE..."
tools=$1 payload=$2
export DEBIAN_FRONTEND=noninteractive
apt="apt-get -q -y --no-install-recommends -o Acquire::Languages=none -o Acquire::Retries=3"
$apt update
# shellcheck disable=SC2086
$apt --download-only install $tools $payload
mkdir -p /quarry/debs
cd /quarry/debs
# shellcheck disable=SC2086
apt-get -q download $payload
for deb in *.deb; do
    dpkg -x "$deb" /quarry
    rm -f "/var/cache/apt/archives/$deb"
done
for name in $payload; do
    [ ! -e "/var/lib/dpkg/info/$name.list" ] || dpkg --purge --force-depends "$name"
done
cd /var/cache/apt/archives
# Some must be configured before others are even unpacked: twice, and then all are.
dpkg --force-unsafe-io --force-depends -i lib*.deb >/tmp/dpkg.log 2>&1 || true
dpkg --force-unsafe-io --force-depends -i ./*.deb >/tmp/dpkg.log 2>&1 || { cat /tmp/dpkg.log >&2 && exit 1; }
rm -f ./*.deb
# One /usr holds all, as everywhere today.
cd /quarry
for name in bin sbin lib; do
    [ ! -d "$name" ] || { mkdir -p "usr/$name" && cp -a "$name/." "usr/$name/" && rm -r "$name"; }
done
# A plugin that EL has in a package of its own, and that would want createrepo_c.
rm usr/lib/python3/dist-packages/dnf-plugins/local.py etc/dnf/plugins/local.conf
cp -a /usr/bin/python3.11 usr/bin/
mkdir -p nvidia/bin
cp -pL usr/bin/orterun usr/bin/orted usr/bin/ompi_info usr/bin/ompi-clean usr/bin/ompi-server nvidia/bin/
patchelf --force-rpath --set-rpath /usr/mpi/gcc/openmpi-4.1.7rc1/lib64 nvidia/bin/*
patchelf --force-rpath --set-rpath /usr/lib64/openmpi/lib usr/bin/orterun usr/bin/orted usr/bin/ompi_info \
    usr/bin/ompi-clean usr/bin/ompi-server
