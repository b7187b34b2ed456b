# Runs on the login node: python FOLDER [NAME], after remote_folder.sh. Prints the folder's path, and the paths of the
# standalone Pythons in it that have all their files. With NAME, it first unpacks the tar.gz on the standard input as the
# Python NAME, unless another clusterctl has done so. What a killed program has left is removed.
set -e
umask 077
name=$2
if [ -n "$name" ]; then
    mkdir -p -- "$folder/pythons"
    cd -- "$folder/pythons"
    exec 9<>.lock
    flock --timeout 600 9
    rm -rf -- .new.??????
    if is_whole "$name"; then
        cat >/dev/null
    else
        new=$(mktemp -d .new.XXXXXX)
        trap 'rm -rf -- "$new"' EXIT
        tar -xzf - --no-same-owner -C "$new"
        "$new/bin/python3" -IS -c ''
        sums=$(cd -- "$new" && find . -type f -exec sha256sum {} +)
        printf '%s\n' "$sums" >"$new/SHA256SUMS"
        sync -f -- "$new"
        # Jobs that run may have it open.
        [ ! -e "$name" ] || mv -T -- "$name" "$(mktemp -d .new.XXXXXX)"
        mv -T -- "$new" "$name"
    fi
fi
[ ! -d "$folder" ] || folder=$(cd -- "$folder" && pwd)
printf '%s\n' "$folder"
for python in "$folder"/pythons/cpython-*-*; do
    ! is_whole "$python" || printf '%s\n' "$python/bin/python3"
done
