# Runs on the login node: detach FOLDER [ID], after remote_folder.sh. Prints lines of a word and values, separated by
# tabs: `mark` and the id in the folder's mark, and for each entry of the folder `entry`, its name, KiB and number of
# files; nothing if the folder does not exist, or is empty and has no mark. With ID, it then removes the folder, with the
# empty folders above it that `attach` created, and prints `left` for what it could not remove. The mark is removed last,
# so that a killed removal can be continued. A folder whose mark is not ID is left as it is.
id=$2
if [ ! -s "$folder/$mark" ] && [ -z "$(list_files)" ]; then
    # A killed program may have left the mark above, and empty folders.
    [ -z "$id" ] || ! find_moved_mark "$id" || remove_created "$id"
    exit 0
fi
cd -- "$folder" || exit
folder=$(pwd)
printf 'mark\t%s\n' "$(head -n 1 "$mark" 2>/dev/null)"
ls -A | while IFS= read -r name; do
    size=$(du -sk -- "$name" 2>/dev/null | cut -f 1)
    printf 'entry\t%s\t%s\t%s\n' "$name" "${size:-0}" "$(find "./$name" ! -type d 2>/dev/null | wc -l)"
done
[ -n "$id" ] && [ "$(head -n 1 "$mark" 2>/dev/null)" = "$id" ] || exit 0
# A program that still writes there, or NFS, may create a file during the removal.
for _ in 1 2 3; do
    list_files | while IFS= read -r name; do
        # Users may have taken away their own permissions to write.
        rm -rf -- "$name" 2>/dev/null || { chmod -R u+rwX -- "$name" && rm -rf -- "$name"; } 2>/dev/null
    done
    [ -n "$(list_files)" ] || break
    sleep 0.2
done
if [ -z "$(list_files)" ]; then
    count=$(sed -n 2p "$mark") above=$folder
    for _ in $(seq "$count"); do above=$(dirname -- "$above"); done
    mv -f -- "$mark" "$above/$mark-$id" && remove_created "$id"
else
    find "$folder" 2>/dev/null | head -n 20 | sed 's/^/left\t/'
fi
