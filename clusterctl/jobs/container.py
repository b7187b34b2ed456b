"""Run a job's command in an Apptainer container, where the node has Apptainer or Singularity."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

# Runs once a rank, on its node: image, folders to bind, names of variables, then after -- the command. The
# container sees the host's variables, but for those that the image sets itself: <TOOL>ENV_ overrides these.
# PMIx keeps what ranks share in a folder of slurmd's.
ENTER = """\
image=$1 folders=$2 names=$3
shift 4
node=${SLURMD_NODENAME:-$HOSTNAME}
rank=${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}
give_up() {
    ((rank)) || echo "clusterctl: node $node $1" >&2
    exit 127
}
tool=$(command -v apptainer || command -v singularity) ||
    give_up "has neither apptainer nor singularity: install one there, or submit without --container"
[[ -e $image ]] || give_up "has no image $image: put it where all nodes see it"
options=(--bind "$folders")
[[ -z ${PMIX_SERVER_TMPDIR:-} ]] || options+=(--bind "$PMIX_SERVER_TMPDIR")
gpus=${SLURM_JOB_GPUS:-}${SLURM_STEP_GPUS:-}
[[ -n $gpus || -n ${SLURM_JOB_ID:-} ]] || gpus=$(nvidia-smi --list-gpus 2>/dev/null) || gpus=
[[ -z $gpus ]] || options+=(--nv)
prefix=${tool##*/}
for name in $names; do
    export "${prefix^^}ENV_$name=${!name}"
done
exec "$tool" exec "${options[@]}" "$image" "$@\""""


def contained(command: str, *, image: str, folders: Iterable[str], variables: Iterable[str]) -> str:
    """The command line, quoted for bash, that runs ``command`` (likewise) in a container.

    ``folders`` are words of bash and are seen inside where they are outside; an ``image`` below ``~/`` is in
    the job user's home.
    """
    binds = ",".join(folders)
    names = shlex.quote(" ".join(variables))
    return f"bash -c {shlex.quote(ENTER)} container {_word(image)} {binds} {names} -- {command}"


def _word(path: str) -> str:
    below_home = path.removeprefix("~/")
    return shlex.quote(path) if below_home == path else f'"$HOME"/{shlex.quote(below_home)}'
