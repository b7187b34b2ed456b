# The proof, a batch job. It finds a module and a way to start MPI programs on all of its nodes. An MPI test judges each
# trial by its answer, because `srun` without PMIx starts N programs of one rank each, which all succeed.
# Variables before this text: root, slurm_path, boot, engines (of containers), launchers, variants (names of modules, or an
# empty text).
# It appends lines of words, separated by tabs, to the file `facts`, and finally the word `end`.
# shellcheck disable=SC2154
cd -- "$SLURM_SUBMIT_DIR" || exit
PATH=$PATH:$slurm_path
say() { (IFS=$'\t' && printf '%s\n' "$*" >>facts); }
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=${#hosts[@]}
say hosts "${hosts[@]}"
unset XDG_RUNTIME_DIR
# A folder for each job, if Slurm or the site has set it for this one.
export site_tmp=${TMPDIR:-}
# MPI's own folders are on the node's disk and end with the job, even those of a trial that fails.
export SLURM_EXPORT_ENV=ALL OMP_NUM_THREADS=1 TMPDIR=/tmp/clusterctl-proof-$SLURM_JOB_ID
export OMPI_MCA_btl_sm_backing_directory=$TMPDIR OMPI_MCA_btl_vader_backing_directory=$TMPDIR
export root engines token=$SLURM_JOB_ID.$RANDOM
echo "$token" >token
python=$root/env/bin/python
on_nodes() { timeout -k 3 60 srun --mpi=none --nodes="$count" --ntasks="$count" --ntasks-per-node=1 "$@" </dev/null; }
trap 'on_nodes rm -rf "$TMPDIR"; say end' EXIT

# shellcheck disable=SC2016
on_nodes bash -c '
    mkdir -p "$TMPDIR"
    say() { printf "node\t%s\t%s\t%s\n" "$SLURMD_NODENAME" "$1" "$2"; }
    {
        [[ $(cat token) != "$token" ]] || say seen yes
        say arch "$(uname -m)"
        say glibc "$(getconf GNU_LIBC_VERSION | cut -d " " -f 2)"
        say version "$("$root/env/bin/python" -c "import numpy, platform; print(platform.python_version())" 2>&1 | tail -n 1)"
        for name in python3 python3.14 python3.13 python3.12 python3.11; do
            path=$(command -v "$name") || continue
            say python "$path $("$path" -c "import platform; print(platform.python_version())" 2>/dev/null)"
        done
        for name in TMPDIR SLURM_TMPDIR LOCAL_SCRATCH SCRATCH_LOCAL LOCALSCRATCH SNIC_TMP \
            /scratch /local /localscratch /local_scratch /lscratch /tmp; do
            path=$name
            [[ $name == /* ]] || { path=${!name:-} && name="\$$name"; }
            # The proof has set this variable, unless a prolog has set it again.
            [[ $path != /tmp/clusterctl-proof-* ]] || path=$site_tmp
            [[ -d $path && -w $path ]] || continue
            say scratch "$name $(df -PkT -- "$path" | tail -n 1 | { read -r _ type _ _ free _ && echo "$type $free"; })"
        done
        for name in $engines; do
            command -v "$name" >/dev/null || continue
            say engine "$name $({ "$name" --version || "$name" version; } 2>&1 | tail -n 1)"
        done
        nvidia-smi -L 2>/dev/null | while read -r line; do say gpu "$line"; done
    } >"from-$SLURMD_NODENAME"
' 2>error
for host in "${hosts[@]}"; do
    if [[ -s from-$host ]]; then cat "from-$host" >>facts; else say lost "$host" "$(tail -n 2 error | tr '\n\t' '  ')"; fi
done
# A node without a route to the internet may take some seconds to say so.
(timeout 4 bash -c '</dev/tcp/pypi.org/443' 2>/dev/null && echo yes >internet) &
internet=$!

# Print why the MPI test's answer is wrong, or nothing.
judge() {
    "$python" -IS - "$count" <<'EOF'
import json, sys
rows = [line for line in open("answer") if line.startswith("{")]
count = int(sys.argv[1])
errors = open("error", errors="replace").read().split("\n")
if not rows:
    print(" ".join(line.strip() for line in errors if line.strip("- "))[:300] or "no answer")
elif len(rows) > 1 or json.loads(rows[0])["world_size"] != count:
    print(f"{len(rows)} programs of {json.loads(rows[0])['world_size']} rank each, and not {count} ranks of one")
elif not json.loads(rows[0])["ok"]:
    print("; ".join(failure["cause"] for failure in json.loads(rows[0])["failures"])[:300])
EOF
}

# Try all launchers with the modules $1. The exit status is 0 after the first that works.
try() {
    local module launcher why started
    if [[ $1 ]]; then
        type module >/dev/null 2>&1 || { path=$PATH && . /etc/profile >/dev/null 2>&1; PATH=$path:$PATH; }
        for module in $1; do
            module load "$module" >error 2>&1 || { say fails "$1" "" "the module $module can't be loaded"; return 1; }
        done
    fi
    if ! "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI' 2>error; then
        say fails "$1" "" "$(tail -n 1 error | tr '\t' ' ' | cut -c 1-300)"
        return 1
    fi
    printf '%s slots=1\n' "${hosts[@]}" >hosts
    for launcher in "${launchers[@]}"; do
        case $launcher in
        mpirun)
            command -v mpirun >/dev/null || { say fails "$1" mpirun "mpirun is not on the PATH" && continue; }
            set -- "$1" mpirun -np "$count" --hostfile hosts --map-by ppr:1:node
            ;;
        *) set -- "$1" srun --mpi="$launcher" --kill-on-bad-exit=1 ;;
        esac
        started=$EPOCHREALTIME
        timeout -k 3 40 "${@:2}" "$python" -c "$boot" "$(<probe.json)" "[\"$(IFS=, && echo "${hosts[*]}")\"]" \
            </dev/null >answer 2>error
        why=$(judge)
        if [[ ! $why ]]; then
            say works "$1" "$launcher" "$(awk "BEGIN { print $EPOCHREALTIME - $started }")" "$(grep '^{' answer)"
            return 0
        fi
        say fails "$1" "$launcher" "${why//$'\t'/ }"
    done
    return 1
}
for variant in "${variants[@]}"; do
    (try "$variant") && break
done
wait "$internet"
say internet "$(cat internet 2>/dev/null)"
