# Runs on the login node: claim FOLDER ID, after remote_folder.sh. Creates the folder and writes its mark, unless it has
# one. Prints lines of a name, a tab and a value: the folder's path, the id in the mark, the free blocks, their size, all
# and free inodes of the disk, the user's quotas there, and the environments in the folder. A folder with other files and
# without a mark is left as it is, and `mark` is empty.
umask 077
set -e
count=0 above=$folder
until [ -d "$above" ]; do
    count=$((count + 1))
    above=$(dirname -- "$above")
done
mkdir -p -- "$folder"
cd -- "$folder"
# A killed clusterctl may leave the folder, or an empty mark.
if [ ! -s "$mark" ] && [ -z "$(ls -A | grep -vxF "$mark")" ]; then
    # The disk may be full.
    printf '%s\n' "$2" "$count" >"$mark" || { rm -f -- "$mark" && remove_created "$count" && exit 1; }
fi
printf 'folder\t%s\nmark\t%s\n' "$(pwd)" "$(head -n 1 "$mark" 2>/dev/null)"
printf 'disk\t%s\n' "$(stat -f -c '%a %S %c %d' .)"
printf 'device\t%s\n' "$(df -P . | tail -n 1 | cut -d ' ' -f 1)"
quota -wp 2>/dev/null | sed 's/^/quota\t/' || true
lfs quota -q -u "$(id -un)" "$(pwd)" 2>/dev/null | tr '\n' ' ' | sed 's/^/lustre\t/;$a\' || true
printf 'environments\t%s\n' "$(cd environments 2>/dev/null && printf '%s ' *)"
