# Prints facts about a host for `doctor --bundle`. Usage: sh -s SECONDS. Changes nothing. All commands run in parallel,
# each into its own file and for SECONDS at most. A command that hangs, for example on NFS or a driver, is reported.
limit=$1 started=0
folder=$(mktemp -d) || exit
trap 'rm -rf "$folder"' EXIT
say() {
    started=$((started + 1))
    one=$folder/$((1000 + started))
    printf '%s\n' "$*" >"$one.name"
    (
        timeout -k 1 "$limit" "$@"
        echo "$?" >"$one.ended"
    ) </dev/null >"$one.text" 2>&1 &
}
have_ended() {
    set -- "$folder"/*.ended
    [ "$#" -eq "$started" ]
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
    say journalctl -u "$unit" -n 300 --no-pager -o short-iso
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
left=$(((limit + 2) * 10))
until have_ended || [ "$left" -eq 0 ]; do
    sleep 0.1
    left=$((left - 1))
done
for name in "$folder"/*.name; do
    one=${name%.name}
    printf '@@ %s\n' "$(cat "$name")"
    tail -c 120000 "$one.text"
    case $(cat "$one.ended" 2>/dev/null) in
        '' | 124 | 137) printf '\n@! no answer within %s s' "$limit" ;;
    esac
    printf '\n\n'
done
