# shellcheck shell=sh disable=SC2034
# The begin of a program for the login node whose first argument is a folder, which may begin with ~/ or $NAME/.
# Sets the variables `folder`, its path, and `mark`, the name of the file in it with the cluster's id.
# A mark has the id and, on a second line, how many folders `attach` created: the folder and those above it.
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

# Remove the empty folders that `attach` created: the folder, and $1 - 1 above it.
remove_created() {
    cd / || exit
    created=$1
    while [ "$created" -gt 0 ] && rmdir -- "$folder" 2>/dev/null; do
        folder=$(dirname -- "$folder")
        created=$((created - 1))
    done
}
