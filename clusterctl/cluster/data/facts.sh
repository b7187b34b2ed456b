# What a host says of itself for `doctor --bundle`. It changes nothing; every part is bounded in time and size.
say() {
    printf '@@ %s\n' "$*"
    timeout 10 "$@" 2>&1 </dev/null | tail -c 120000
    printf '\n'
}
say date --utc --iso-8601=seconds
say uname -a
say cat /etc/os-release
say uptime
say free -m
say df -hT
say ip address
say ip route
say ss -ltn
say mount
say systemctl --failed --no-pager
for unit in munge slurmctld slurmd slurmdbd mariadb sshd ssh chronyd chrony nvidia-fabricmanager firewalld; do
    systemctl cat "$unit" >/dev/null 2>&1 && say journalctl -u "$unit" -n 300 --no-pager -o short-iso
done
say journalctl -p warning -n 200 --no-pager -o short-iso
say dmesg --level=err,warn
for log in /var/log/slurm/*.log /var/log/cloud-init.log /var/log/nvidia-installer.log /var/log/dnf.log; do
    [ -f "$log" ] && say tail -c 60000 "$log"
done
say sinfo -N -l
say scontrol show nodes
say nvidia-smi
say nvidia-smi topo -m
if command -v rpm >/dev/null && [ -d /var/lib/rpm ]; then
    say rpm -qa --queryformat '%{NAME} %{VERSION}-%{RELEASE}\n'
fi
command -v dpkg-query >/dev/null && say dpkg-query --show
true
