# Runs on the controller: hold SILENCE_S [salloc's options]. Holds an allocation as long as a line arrives on its
# input at least every SILENCE_S seconds. Prints the output of salloc; once nodes are allocated also `granted`,
# Slurm's variables, PATH and an empty line; and `ended` at the end.
silence=$1
shift
exec {signs}<&0 {said}>&1
coproc salloc {
    exec salloc --kill-command=TERM "$@" \
        sh -c 'echo granted; env | grep -E "^(SLURM_|PATH=)"; echo; exec cat >/dev/null' >&"$said" 2>&1
}
pid=$salloc_PID hold=${salloc[1]}
{ while read -r -t "$silence" _; do :; done; } <&"$signs" &
watch=$!
# Wait for the keep-alives to stop, or for salloc, whose request may be rejected or time out.
wait -n
# With nodes, the command of salloc reads the end of its input, which releases them. Without nodes, the request is
# withdrawn.
exec {hold}>&-
pgrep -P "$pid" >/dev/null || kill -TERM "$pid" 2>/dev/null
kill -TERM "$watch" 2>/dev/null
wait
echo ended
