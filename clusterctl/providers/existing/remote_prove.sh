# Runs on the login node: prove FOLDER NAME SLURM_PATH PATIENCE_S SCRIPT_BYTES PROBE_BYTES [OPTION OF SBATCH...]. Reads
# a batch script and a file for it, submits the script as a job, and prints the job's facts. If the job has not started
# within PATIENCE_S, it is cancelled, and the last line is `pending`, why and its expected start. The job is cancelled too
# when the input ends early, or when squeue gives no answer for as long as the job may wait and run. Only the lines
# `waiting` are printed before.
umask 077
name=$2 patience=$4 bytes=$5 more=$6
PATH=$PATH:$3
cd -- "$1" || exit
shift 6
unset $(env | sed -n 's/^\(SBATCH_[A-Z_]*\)=.*/\1/p')
# Of an `attach` that was killed.
scancel --user="$(id -un)" --name="$name" 2>/dev/null
rm -rf -- proof.??????
proof=$(mktemp -d proof.XXXXXX) && cd -- "$proof" || exit
head -c "$bytes" >proof.sbatch
head -c "$more" >probe.json
: >facts
clean() {
    trap - TERM HUP INT
    kill "$watch" 2>/dev/null
    cd ..
    rm -rf -- "$proof" || { sleep 1 && rm -rf -- "$proof"; }
}
if ! id=$(sbatch --parsable --job-name="$name" "$@" --output=output proof.sbatch 2>error); then
    printf 'refused\t%s\n' "$(tr '\n' ' ' <error)"
    clean
    exit 0
fi
id=${id%%;*}
trap 'scancel "$id"; clean; exit 143' TERM HUP INT
exec 3<&0
{ cat >/dev/null; kill -TERM $$; } <&3 2>/dev/null &
watch=$!
# The job runs for 5 minutes at most, see prove.py; Slurm may end it a minute later.
begun=$(date +%s) asked=0 gone=0 last=$((patience + 360))
until grep -qx end facts; do
    now=$(($(date +%s) - begun))
    if [ "$now" -ge "$asked" ]; then
        echo waiting
        # squeue is asked after 2 s, and then every 10 s.
        if [ "$asked" -gt 0 ] && ! state=$(squeue --noheader --jobs="$id" --format='%T|%r|%S' 2>failure); then
            # A query that fails tells nothing of the job.
            state='?'
            ! grep -qi 'invalid job id' failure || state=
        fi
        if [ "$asked" -gt 0 ] && [ -z "$state" ]; then
            # The file of a job that has ended may arrive later.
            gone=$((gone + 1))
            [ "$gone" -lt 2 ] || break
        elif [ "$now" -ge "$last" ]; then
            scancel "$id"
            cat failure >>output
            break
        elif [ "$now" -ge "$patience" ] && [ "${state%%|*}" = PENDING ]; then
            scancel "$id"
            rest=${state#*|}
            printf 'pending\t%s\t%s\n' "${rest%%|*}" "${rest#*|}"
            clean
            exit 0
        fi
        [ "$asked" -eq 0 ] && asked=2 || asked=$((now + 10))
        [ "$asked" -le "$patience" ] || [ "$now" -ge "$patience" ] || asked=$patience
    fi
    sleep 0.2
done
cat facts
[ ! -s output ] || printf 'output\t%s\n' "$(tail -n 3 output | tr '\n\t' '  ')"
clean
