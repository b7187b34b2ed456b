# Runs on the login node: mpi PYTHON MODULES..., in bash. Prints the number, from 0 on, of the first of MODULES, separated
# by blanks, with which mpi4py finds its MPI library, or nothing. Under sshd, bash has read ~/.bashrc, with any settings.
set +u
trap - EXIT
finds_mpi() {
    [[ ! $1 ]] || type module >/dev/null 2>&1 || { path=$PATH && . /etc/profile; PATH=$path:$PATH; }
    for module in $1; do module load "$module" || return; done
    "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI'
}
python=$1 number=0
shift
for modules in "$@"; do
    if (finds_mpi "$modules") >/dev/null 2>&1 </dev/null; then
        echo "$number"
        exit
    fi
    number=$((number + 1))
done
