# Runs on the login node: claim FOLDER ID. Creates FOLDER, which may begin with ~/ or $NAME/, and writes ID to its mark,
# unless the folder has a mark. Prints lines of a name, a tab and a value: the folder's path, the id in the mark, the
# free blocks, their size, all and free inodes of the disk, the user's quotas there, and the environments in the folder. A folder with other
# files and without a mark is left as it is, and `mark` is empty.
umask 077
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
set -e
mkdir -p -- "$folder"
cd -- "$folder"
mark=.clusterctl-cluster
# A killed clusterctl may leave the folder, or an empty mark.
if [ ! -s "$mark" ] && [ -z "$(ls -A | grep -vxF "$mark")" ]; then printf '%s\n' "$2" >"$mark"; fi
printf 'folder\t%s\nmark\t%s\n' "$(pwd)" "$(cat "$mark" 2>/dev/null)"
printf 'disk\t%s\n' "$(stat -f -c '%a %S %c %d' .)"
printf 'device\t%s\n' "$(df -P . | tail -n 1 | cut -d ' ' -f 1)"
quota -wp 2>/dev/null | sed 's/^/quota\t/' || true
lfs quota -q -u "$(id -un)" "$(pwd)" 2>/dev/null | tr '\n' ' ' | sed 's/^/lustre\t/;$a\' || true
printf 'environments\t%s\n' "$(cd environments 2>/dev/null && printf '%s ' *)"
