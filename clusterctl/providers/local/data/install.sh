# Install the packages "$@" in a node. This shell has the node's root folder and processes, but the network of the
# machine that runs the node. stdin: the line with apt's proxy, or an empty line, then the machine's resolv.conf.
# Prints the packages that were missing.
set -eu
read -r proxy
# An earlier `up` may have been killed.
rm -f /etc/apt/apt.conf.d/99bake
for name; do
    shift
    if command -v dpkg >/dev/null; then
        state=$(dpkg-query --show --showformat='${db:Status-Status}' "$name" 2>/dev/null) || state=
        [ "$state" = installed ] || set -- "$@" "$name"
    else
        rpm --query --quiet --whatprovides "$name" || set -- "$@" "$name"
    fi
done
[ $# -gt 0 ] || exit 0
# A node that was just started: packages may start services once it has booted.
systemctl is-system-running --wait >/dev/null 2>&1 || true
trap 'rm -f /etc/apt/apt.conf.d/99bake; : >/etc/resolv.conf' EXIT
cat >/etc/resolv.conf
if command -v dpkg >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # The proxy's address may contain a password.
    (umask 077 && echo "$proxy" >/etc/apt/apt.conf.d/99bake)
    dpkg --configure -a >&2
    apt-get --quiet=2 update >&2
    apt-get --quiet=2 --yes --no-install-recommends --option DPkg::Lock::Timeout=60 install "$@" >&2
    apt-get clean
    rm -rf /var/lib/apt/lists/*
else
    dnf --quiet --assumeyes --setopt=install_weak_deps=False install "$@" >&2
    dnf --quiet clean all >&2
fi
echo "$*"
