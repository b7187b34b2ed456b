# Runs on a node, in a job: sshd SIZE KEY. Its input is a host key of SIZE bytes, and then an SSH connection, which a
# user with the private part of KEY may open. Nothing listens on a port, and nothing stays after the connection.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
sshd=$(command -v sshd) || {
    echo "clusterctl: $(uname -n) has no program sshd" >&2
    exit 127
}
umask 077
folder=$(mktemp -d /tmp/clusterctl-code.XXXXXX) || exit
mark=CLUSTERCTL_ENTRY=$folder
clean() {
    rm -rf "$folder"
    # An editor's server would survive the connection. Jobs submitted in its terminal inherit the mark.
    for process in /proc/[0-9]*; do
        if grep -qzxF "$mark" "$process/environ" && grep -qzxF "SLURM_JOB_ID=$SLURM_JOB_ID" "$process/environ"; then
            kill -KILL "${process#/proc/}"
        fi
    done 2>/dev/null
}
trap clean EXIT
trap 'exit 143' HUP INT TERM
head -c "$1" >"$folder/host_key"
printf '%s\n' "$2" >"$folder/authorized_keys"

# sshd clears the environment. Take that of the job's script, of which this step has only some variables. A name of
# the user or the host, or a value that sshd_config can't hold, is left out.
environ=/proc/self/environ
for process in $(scontrol listpids "$SLURM_JOB_ID" | awk '$3 == "batch" { print $1 }'); do
    if [ -r "/proc/$process/environ" ] && ! grep -qzxF -e --job-name=telemetry "/proc/$process/cmdline"; then
        environ=/proc/$process/environ
        # The program and its launcher have the variables that job.py sets.
        grep -qz '^MASTER_ADDR=' "$environ" && break
    fi
done
without='^(HOME|USER|LOGNAME|MAIL|SHELL|PWD|OLDPWD|SHLVL|_|TERM|DISPLAY|HOSTNAME|ENVIRONMENT)=|^(SSH|XDG|SLURM_STEP)_'
set_env=$(sed -zE "/^[A-Za-z_][A-Za-z_0-9]*=/!d; /$without/d; /[\"\\\\\\n]/d; s/.*/\"&\"/" "$environ" | tr '\0' ' ')
cat >"$folder/sshd_config" <<END
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized_keys
# /tmp, in which the folder is, belongs to root and is writable for all.
StrictModes no
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
LogLevel ERROR
ClientAliveInterval 15
ClientAliveCountMax 4
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
SetEnv $mark $set_env
END
# sshd ends with a failure at each disconnect, of which srun would complain.
"$sshd" -i -e -f "$folder/sshd_config" || true
