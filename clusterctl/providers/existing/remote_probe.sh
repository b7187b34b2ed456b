# shellcheck shell=sh disable=SC2016,SC2046
# Describes a Slurm site to an ordinary account, on its login node. Writes nothing there, and starts no job.
# Each line of the output is a key and its values, separated by tabs; a line feed in a value is a \037. Arguments: the
# account, the QOS, the partition, the Python, the modules and the folder of Slurm's commands that the user has chosen, or
# empty texts; a pattern of the modules to list.
export LC_ALL=C clusterctl_modules="$5"
me=$(id -un)
have() { command -v "$1" >/dev/null 2>&1; }
say() {
    key=$1
    shift
    line=$key
    for value in "$@"; do
        line="$line	$(printf %s "$value" | tr '\t\n' ' \037')"
    done
    printf '%s\n' "$line"
}

# Run the commands $1 in bash with a login shell's settings: sites define modules and the PATH in /etc/profile. Print only
# what the commands print. Under sshd, bash also reads ~/.bashrc, which may print anything.
profile() {
    mark="clusterctl $$"
    bash -c '. /etc/profile >/dev/null 2>&1; printf "\n%s\n" "$0"; '"$1" "$mark" 2>/dev/null </dev/null |
        sed "1,/^$mark\$/d"
}
list_modules() { profile '(module -t avail) 2>&1' | sed 's/(.*)$//; s/<.*//' | grep -v '/$' | grep -iE "$1" | sort -u; }

{
    answer=no
    if have curl; then
        curl -sS -m 4 -o /dev/null https://pypi.org/simple/pip/ 2>/dev/null && answer=yes
    elif have python3; then
        python3 -c 'import urllib.request as u; u.urlopen("https://pypi.org/simple/pip/", timeout=4)' 2>/dev/null &&
            answer=yes
    fi
    say internet "$answer"
} </dev/null &

slurm_path=
with_modules=$(profile '[ -z "$clusterctl_modules" ] || module load $clusterctl_modules >/dev/null; echo "$PATH"' | head -n 1)
folders=$6:$PATH:$with_modules:/usr/local/bin:/opt/slurm/bin:/opt/slurm/current/bin
IFS=:
for folder in $folders:/usr/local/slurm/bin:/cm/shared/apps/slurm/current/bin; do
    if [ -x "$folder/sbatch" ]; then
        slurm_path=$folder
        break
    fi
done
unset IFS
say slurm_path "$slurm_path"
if [ -z "$slurm_path" ]; then
    list_modules '(^|/)slurm([-/]|$)' | while read -r module; do say slurm_module "$module"; done
    [ -z "$5" ] || say loading "$(profile 'module load $clusterctl_modules 2>&1')"
    exit 0
fi
PATH=$PATH:$slurm_path

# Slurm's commands may wait long for a slurmctld that is down, so the first failure is the answer.
format='Partition:|,Time:|,DefaultTime:|,Nodes:|,NodeList:|,Gres:|,Available:|,NodeAIOT:|'
if ! listed=$(sinfo -h -O "$format" 2>&1 </dev/null); then
    say sinfo "$listed"
    exit 0
fi
printf '%s\n' "$listed" | sed 's/^/partition|/' | tr '|' '\t'
[ -z "$3" ] || sinfo -h -a -p "$3" -O "$format" 2>/dev/null | sed 's/^/named|/' | tr '|' '\t'

shell=$(getent passwd "$me" 2>/dev/null | cut -d: -f7)
say account "$me"
say shell "${shell:-$SHELL}"
say home "$HOME"
say host "$(uname -n)"
say arch "$(uname -m)"
# shellcheck source=/dev/null
say system "$(. /etc/os-release 2>/dev/null && printf '%s %s' "$ID" "$VERSION_ID")"
say glibc "$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)"

have quota && quota -s 2>/dev/null | while read -r line; do [ -z "$line" ] || say quota "$line"; done

# The Python that the user has named comes first, then that of the named modules.
(
    own=$(command -v python3)
    # shellcheck disable=SC2030
    [ -z "$5" ] || PATH=$with_modules:$PATH
    loaded=$(command -v python3)
    [ "$loaded" != "$own" ] || loaded=
    for program in "$4" "$loaded" python3.14 python3.13 python3.12 python3.11 python3 /usr/libexec/platform-python; do
        have "$program" || continue
        say python "$(command -v "$program")" "$("$program" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)"
    done
)
list_modules "$7" | head -n 200 | while read -r module; do say module "$module"; done

say slurm_version "$(sinfo --version 2>&1 | head -n 1)"
scontrol show config 2>&1 | awk -F' *= *' \
    '$1 ~ /^(ClusterName|MaxArraySize)$/ {printf "config\t%s\t%s\n", $1, $2}'
srun --mpi=list 2>&1 | sed -n 's/^[[:space:]]*\([a-z0-9_]*\)$/mpi\t\1/p; s/.*pmix plugin versions available: */mpi\t/p' |
    tr ',' '\n' | sed 's/^mpi\t//; s/^/mpi\t/'
if refusal=$(sacct -X -n -P --starttime=now-1hour --format=jobid 2>&1 >/dev/null </dev/null); then
    say sacct ""
else
    # Without the name of this shell, which may not run sacct.
    refusal=$(printf '%s\n' "$refusal" | sed 's/^.*: \([^ ]*sacct: \)/\1/')
    say sacct "${refusal:-it exits with an error}"
fi

associations=$(sacctmgr -nP show assoc where user="$me" format=account,partition,maxsubmit,defaultqos,qos 2>/dev/null)
printf '%s\n' "$associations" | sed -n 's/^/association|/p' | tr '|' '\t'
sacctmgr -nP show qos format=name,maxsubmitjobsperuser 2>/dev/null | sed -n 's/^/qos|/p' | tr '|' '\t'

# sbatch tells whether it would accept a job, without submitting any.
unset $(env | sed -n 's/^\(SBATCH_[A-Z0-9_]*\)=.*/\1/p') 2>/dev/null
qos=$2 row=try limit=--time=1
# Arguments: the account, the partition, the number of nodes.
try() {
    answer=$(cd / && sbatch --test-only --nodes="$3" --ntasks-per-node=1 $limit ${1:+"--account=$1"} \
        ${2:+"--partition=$2"} ${qos:+"--qos=$qos"} --wrap=true 2>&1 </dev/null)
    code=$?
    say "$row" "$1" "$2" "$3" "$code" "$answer"
    return $code
}
# Partitions that are up come first, then Slurm's default.
partitions=$(printf '%s\n' "$listed" | awk -F'|' 'NF > 7 {
    shown = $1
    sub(/\*$/, "", $1)
    if (!seen[$1]++) print ($7 != "up") (shown == $1), NR, $1
}' | sort -k1,1 -k2,2n | cut -d' ' -f3 | head -n 40)
accounts=
if [ -z "$1" ]; then
    accounts=$(printf '%s\n' "$associations" | cut -d'|' -f1 | sort -u | head -n 12)
fi
chosen=none
left=40
for partition in ${3:-$partitions}; do
    for account in "$1" $accounts; do
        left=$((left - 1))
        [ "$left" -ge 0 ] || break 2
        # The first attempt has only an account that the user has chosen, so Slurm's default account is preferred.
        if try "$account" "$partition" 1; then
            chosen=$account first=$partition
            break 2
        fi
    done
done
if [ "$chosen" != none ]; then
    say chosen "$chosen" "$first"
    for partition in $partitions; do
        [ "$partition" = "$first" ] || try "$chosen" "$partition" 1
    done
    try "$chosen" "$first" 2
    row=timeless limit=
    try "$chosen" "$first" 1
    say partition_qos "$(scontrol show partition "$first" 2>/dev/null | sed -n 's/.* QoS=\([^ ]*\).*/\1/p')"
fi
say clock "$(date +%s)"
wait
say end
