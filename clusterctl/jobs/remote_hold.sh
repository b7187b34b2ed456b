# Runs on the controller: hold SILENCE_S [salloc's options]. Holds an allocation for as long as a line comes on
# its input at least every SILENCE_S seconds. Says what salloc says; when there are nodes also `granted`, Slurm's
# variables and an empty line; and `ended` at the end.
silence=$1
shift
exec {signs}<&0 {said}>&1
coproc salloc {
    exec salloc --kill-command=TERM "$@" \
        sh -c 'echo granted; env | grep "^SLURM_"; echo; exec cat >/dev/null' >&"$said" 2>&1
}
pid=$salloc_PID hold=${salloc[1]}
{ while read -r -t "$silence" _; do :; done; } <&"$signs" &
watch=$!
wait -n    # for whichever ends first: salloc may be refused, or its time be over
exec {hold}>&-    # with nodes, its command reads the end of its input, and they are given back
pgrep -P "$pid" >/dev/null || kill -TERM "$pid" 2>/dev/null    # without, the request is taken back
kill -TERM "$watch" 2>/dev/null
wait
echo ended
