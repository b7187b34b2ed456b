# shellcheck shell=sh disable=SC2034
# The begin of a program for the login node whose first argument is a folder, which may begin with ~/ or $NAME/.
# Sets the variables `folder`, its path, and `mark`, the name of the file in it with the cluster's id.
# A mark has the id, how many folders `attach` created (the folder and those above it), and Slurm's ClusterName.
case $1 in
'~') folder=$HOME ;;
'~/'*) folder=$HOME/${1#??} ;;
'$'*)
    rest=${1#?}
    name=${rest%%/*}
    # A site may set the variable only for login shells.
    [ -n "$(printenv "$name")" ] || . /etc/profile >/dev/null 2>&1
    value=$(printenv "$name") || { echo "the variable \$$name is not set on the login node" >&2 && exit 1; }
    folder=$value/${rest#"$name"/}
    ;;
/*) folder=$1 ;;
*) folder=$HOME/$1 ;;
esac
mark=.clusterctl-cluster

# While folders are created or removed, the mark of cluster ID lies above them as .clusterctl-cluster-ID, so that a
# killed program can be continued. Set `above`, the folder that has it, and `count`, the number of folders below `above`.
find_moved_mark() {
    above=$folder count=0
    until [ -e "$above/$mark-$1" ]; do
        [ "$above" != / ] || return 1
        above=$(dirname -- "$above")
        count=$((count + 1))
    done
}

# Remove the empty folders below `above`, which `attach` created, and then the mark of cluster ID.
remove_created() {
    cd / || exit
    while [ "$count" -gt 0 ] && { [ ! -d "$folder" ] || rmdir -- "$folder" 2>/dev/null; }; do
        folder=$(dirname -- "$folder")
        count=$((count - 1))
    done
    rm -f -- "$above/$mark-$1"
}

# Whether the environment or Python $1 has all files as it was built with. A site may have removed old files.
is_whole() { (cd -- "$1" && sha256sum --check --strict --status SHA256SUMS && bin/python3 -IS -c '') 2>/dev/null; }

# Print the paths in the folder of the environments and Pythons of clusterctl that have lost or changed files.
list_damaged() (
    cd -- "$folder" 2>/dev/null || exit 0
    for built in environments/*; do [ ! -L "$built" ] || is_whole "$built" || printf '%s\n' "$built"; done
    for built in pythons/cpython-*-*; do [ ! -d "$built" ] || is_whole "$built" || printf '%s\n' "$built"; done
    [ -e env ] || [ ! -L env ] || printf 'env\n'
)

# Print the names of the files in the folder, without marks.
list_files() { ls -A -- "$folder" 2>/dev/null | grep -v "^$mark"; }
