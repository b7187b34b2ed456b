# shellcheck shell=sh disable=SC2016,SC2046
# Describes a Slurm site to an ordinary account, on its login node. Writes nothing there, and starts no job.
# Each line of the output is a key and its values, separated by tabs; a line feed in a value is a \037. Arguments: the
# account, the QOS, the partition, the Python, the modules and the folder of Slurm's commands that the user has chosen, or
# empty texts; a pattern of the modules to list; the time limit of the test job in minutes, and more options for it, both
# as the user has chosen; a text if jobs name no partition, or an empty text.
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

# The modules are loaded for all that follows, and later for all of Slurm's commands: the variables that they set, and
# SLURM_CONF of a login shell. Its other variables may be those of an allocation, or a token.
variables=$(profile 'trap - EXIT
    declare -A old
    while IFS= read -rd "" entry; do old[${entry%%=*}]=${entry#*=}; done < <(env -0)
    [ -z "$clusterctl_modules" ] || module load $clusterctl_modules >/dev/null
    while IFS= read -rd "" entry; do
        name=${entry%%=*} value=${entry#*=}
        case $name in
        SLURM_CONF) ;;
        SLURM_JWT | SLURM_JOB* | _* | [!A-Z]* | *[!A-Z0-9_]* | PATH | PWD | OLDPWD | SHLVL | LC_ALL | LOADEDMODULES* | MODULE* | LMOD* | BASH*) continue ;;
        *) [ "${old[$name]+set}" != set ] || [ "${old[$name]}" != "$value" ] || continue ;;
        esac
        [[ $value == *[[:cntrl:]]* ]] || printf "%s=%s\n" "$name" "$value"
    done < <(env -0)
    printf "PATH=%s\n" "$PATH"')
with_modules=
while IFS= read -r setting; do
    case $setting in
    PATH=*) with_modules=${setting#PATH=} ;;
    ?*=*)
        say variable "${setting%%=*}" "${setting#*=}"
        export "${setting?}"
        ;;
    esac
done <<END
$variables
END

slurm_path=
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
    refusal=$listed
    # A site may show users no nodes (PrivateData), and yet its partitions.
    listed=$(scontrol show partition --oneliner 2>/dev/null </dev/null | awk '{
        split("", value)
        for (i = 1; i <= NF; i++) if (split($i, pair, "=") > 1) value[pair[1]] = substr($i, length(pair[1]) + 2)
        if (value["PartitionName"]) print value["PartitionName"] (value["Default"] == "YES" ? "*" : "") "|" value["MaxTime"] \
            "|" value["DefaultTime"] "|" value["TotalNodes"] "|" value["Nodes"] "|(null)|" tolower(value["State"]) "||"
    }')
    if [ -z "$listed" ]; then
        say sinfo "$refusal"
        list_modules '(^|/)slurm([-/]|$)' | while read -r module; do say slurm_module "$module"; done
        exit 0
    fi
fi
printf '%s\n' "$listed" | sed 's/^/partition|/' | tr '|' '\t'
[ -z "$3" ] || sinfo -h -a -p "$3" -O "$format" 2>/dev/null | sed 's/^/named|/' | tr '|' '\t'

say account "$me"
say home "$HOME"
say host "$(uname -n)"
say arch "$(uname -m)"
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
qos=$2 row=try options=$9
# Arguments: the account, the partition, the number of nodes, the time limit in minutes.
try() {
    account=$1 partition=$2 nodes=$3 limit=$4
    eval "set -- $options"
    answer=$(cd / && sbatch --test-only --nodes="$nodes" --ntasks-per-node=1 ${limit:+"--time=$limit"} \
        ${account:+"--account=$account"} ${partition:+"--partition=$partition"} ${qos:+"--qos=$qos"} "$@" --wrap=true \
        2>&1 </dev/null)
    code=$?
    say "$row" "$account" "$partition" "$nodes" "$code" "$answer" "$limit"
    return $code
}
# Try the partitions $2 and all accounts with the time limit $1, at most $3 times.
search() {
    left=$3
    for place in $2; do
        [ "$place" != none ] || place=
        for account in "$chosen_account" $accounts; do
            left=$((left - 1))
            [ "$left" -ge 0 ] || return 1
            # The first attempt has only an account that the user has chosen, so Slurm's default account is preferred.
            ! try "$account" "$place" 1 "$1" || return 0
        done
    done
    return 1
}
# Partitions that are up come first, then Slurm's default.
partitions=$(printf '%s\n' "$listed" | awk -F'|' 'NF > 7 {
    shown = $1
    sub(/\*$/, "", $1)
    if (!seen[$1]++) print ($7 != "up") (shown == $1), NR, $1
}' | sort -k1,1 -k2,2n | cut -d' ' -f3 | head -n 40)
chosen_account=$1 accounts=
if [ -z "$1" ]; then
    accounts=$(printf '%s\n' "$associations" | cut -d'|' -f1 | sort -u | head -n 12)
fi
first=$(printf '%s\n' "$partitions" | head -n 1)
named=$3 found=no
[ -z "${10}" ] || named=none
if search "${8:-5}" "${named:-$partitions}" 40; then
    found=yes
elif [ -z "$named" ] && search "${8:-5}" none 12; then
    # The site chooses the partition of each job itself.
    found=yes
elif [ -z "$8" ]; then
    # The site may demand longer jobs, or shorter ones.
    for minutes in 10 60 1 ''; do
        if search "$minutes" "${named:-$first none}" 6; then
            found=yes
            break
        fi
    done
fi
if [ "$found" = yes ]; then
    chosen=$account first=$partition minutes=$limit
    say chosen "$chosen" "$first" "$minutes"
    for other in $partitions; do
        [ -z "$first" ] || [ "$other" = "$first" ] || try "$chosen" "$other" 1 "$minutes"
    done
    try "$chosen" "$first" 2 "$minutes"
    row=timeless
    try "$chosen" "$first" 1 ''
    say partition_qos "$(scontrol show partition ${first:+"$first"} 2>/dev/null | sed -n 's/.* QoS=\([^ ]*\).*/\1/p' | head -n 1)"
fi
say end
