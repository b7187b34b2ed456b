# Runs on the login node: enter JOB PROGRAM ARGUMENT... Starts a shell program as a step on the first node of a job,
# with its own input and output. The job may have been requeued to other nodes since clusterctl looked.
nodes=$(squeue --noheader --jobs="$1" --states=RUNNING --format=%N 2>/dev/null)
node=$(scontrol show hostnames "$nodes" | head -n 1)
if [ -z "$nodes" ]; then
    echo "clusterctl: job $1 is not running, so it cannot be entered" >&2
    exit 1
fi
job=$1
shift
# All cores, memory and GPUs of the job's node, shared with the job's other steps.
exec srun --quiet --overlap --unbuffered --nodes=1 --ntasks=1 --mem=0 --cpu-bind=none --mpi=none \
    --job-name=code --jobid="$job" --nodelist="$node" sh -c "$@"
