# Runs on the login node: prove FOLDER NAME SLURM_PATH PATIENCE_S LIMIT_S SCRIPT_BYTES PROBE_BYTES [OPTION OF SBATCH...].
# Reads a batch script and a file for it, submits the script as a job, and prints the job's facts. LIMIT_S: the job's time
# limit. If the job has not started
# within PATIENCE_S, it is cancelled, and the last line is `pending`, why and its expected start. The job is cancelled too
# when the input ends early, or when squeue gives no answer for as long as the job may wait and run. Only the lines
# `waiting` are printed before.
umask 077
name=$2 patience=$4 limit=$5 bytes=$6 more=$7 id='' me=$(id -un)
PATH=$PATH:$3
cd -- "$1" || exit
shift 7
unset $(env | sed -n 's/^\(SBATCH_[A-Z_]*\)=.*/\1/p')
# Cancel the job or, while its id is unknown, all proofs of this cluster.
cancel() {
    if [ -n "$id" ]; then scancel "$id"; else scancel --user="$me" --name="$name"; fi 2>/dev/null
}
# Cancel the job of an `attach` that was killed, and remove its folder.
cancel
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
refuse() {
    printf 'refused\t%s\n' "$(cat error answer | tr '\n\t' '  ')"
    clean
    exit 0
}
trap 'cancel; clean; exit 143' TERM HUP INT
sbatch --parsable --job-name="$name" "$@" --output=output proof.sbatch >answer 2>error || refuse
id=$(cut -d';' -f1 answer)
case $id in
'' | *[!0-9]*)
    # A site's own sbatch prints more than the id.
    id=$(squeue --noheader --user="$me" --name="$name" --format=%A 2>/dev/null | sort -n | tail -n 1)
    [ -n "$id" ] || id=$(sed -n 's/^\([0-9][0-9]*\)\(;.*\)*$/\1/p' answer | tail -n 1)
    ;;
esac
[ -n "$id" ] || { cancel && refuse; }
exec 3<&0
{ cat >/dev/null; kill -TERM $$; } <&3 2>/dev/null &
watch=$!
# Slurm may end the job a minute after its limit.
begun=$(date +%s) asked=0 gone=0 last=$((patience + limit + 60))
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
            cat failure >>output
            break
        elif [ "$now" -ge "$patience" ] && [ "${state%%|*}" = PENDING ]; then
            cancel
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
# The job must not outlive its folder.
grep -qx end facts || cancel
cat facts
[ ! -s output ] || printf 'output\t%s\n' "$(tail -n 3 output | tr '\n\t' '  ')"
clean
