#!/bin/bash
# What Google's guest agent does with accounts, on a machine that is taken for a Compute Engine instance: as
# google_guest_agent/non_windows_accounts.go and cfg/cfg.go of GoogleCloudPlatform/guest-agent (2026-07) have it.
set -u
ip route replace 169.254.169.254 dev host0 # Google's routers know it; here it is on the bridge

# The machine is one of ours below: a fresh image has none of our accounts.
until ! id clusterctl 2>/dev/null || userdel --force --remove clusterctl; do sleep 0.2; done >/dev/null
rm -f /etc/sudoers.d/clusterctl

attribute() {
    python3 - "http://169.254.169.254/computeMetadata/v1/instance/attributes/$1" <<'PY'
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Metadata-Flavor": "Google"})
with urllib.request.urlopen(asked, timeout=10) as answer:
    print(answer.read().decode())
PY
}

until oslogin=$(attribute enable-oslogin); do sleep 0.2; done 2>/dev/null # until the instance is made
[[ ${oslogin,,} != true ]] || exit 0                                            # accounts are OS Login's affair
keys=$(attribute ssh-keys) || exit

# The host keys are published by now, and sshd runs, from OpenSSH 9.8 on its sshd-session: who comes first is refused.
until journalctl --quiet --identifier={sshd,sshd-session} | grep --quiet "Invalid user"; do sleep 0.2; done

[[ -e /etc/sudoers.d/google_sudoers ]] ||
    install -m 0440 <(echo '%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL') /etc/sudoers.d/google_sudoers
groupadd google-sudoers
while IFS=: read -r user key; do
    if ! getent passwd "$user" >/dev/null; then
        useradd -m -s /bin/bash -p '*' "$user"
        for group in adm dip docker lxd plugdev video; do gpasswd -a "$user" "$group"; done
    fi
    gpasswd -a "$user" google-sudoers
    home=$(getent passwd "$user" | cut -d: -f6)
    install -d -m 0700 -o "$user" -g "$user" "$home/.ssh"
    printf '# Added by Google\n%s\n' "$key" >"$home/.ssh/authorized_keys"
    chown "$user": "$home/.ssh/authorized_keys" && chmod 0600 "$home/.ssh/authorized_keys"
done <<<"$keys"
