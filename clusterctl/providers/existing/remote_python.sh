# Runs on the login node: python FOLDER [NAME], after remote_folder.sh. Prints the folder's path, and the paths of the
# standalone Pythons in it. With NAME, it first unpacks the tar.gz on the standard input as the Python NAME, unless another
# clusterctl has done so. What a killed program has left is removed.
set -e
umask 077
name=$2
if [ -n "$name" ]; then
    mkdir -p -- "$folder/pythons"
    cd -- "$folder/pythons"
    exec 9<>.lock
    flock --timeout 600 9
    rm -rf -- .new.??????
    if [ -e "$name" ]; then
        cat >/dev/null
    else
        new=$(mktemp -d .new.XXXXXX)
        trap 'rm -rf -- "$new"' EXIT
        tar -xzf - --no-same-owner -C "$new"
        "$new/bin/python3" -IS -c ''
        sync -f -- "$new"
        mv -T -- "$new" "$name"
    fi
fi
[ ! -d "$folder" ] || folder=$(cd -- "$folder" && pwd)
printf '%s\n' "$folder"
for python in "$folder"/pythons/cpython-*-*/bin/python3; do
    [ ! -x "$python" ] || printf '%s\n' "$python"
done
