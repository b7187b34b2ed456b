# Runs on the login node: detach FOLDER [ID]. Prints lines of a word and values, separated by tabs: `mark` and the id in
# the folder's mark, and for each entry of the folder `entry`, its name, KiB and number of files; nothing if the folder
# does not exist. With ID, it then removes the folder, and prints `left` for what it could not remove. The mark is
# removed last, so that a killed removal can be continued. A folder whose mark is not ID is left as it is.
folder=$1 id=$2 mark=.clusterctl-cluster
[ -d "$folder" ] || exit 0
cd -- "$folder" || exit
printf 'mark\t%s\n' "$(cat "$mark" 2>/dev/null)"
ls -A | while IFS= read -r name; do
    size=$(du -sk -- "$name" 2>/dev/null | cut -f 1)
    printf 'entry\t%s\t%s\t%s\n' "$name" "${size:-0}" "$(find "./$name" ! -type d 2>/dev/null | wc -l)"
done
[ -n "$id" ] && [ "$(cat "$mark" 2>/dev/null)" = "$id" ] || exit 0
# A program that still writes there, or NFS, may create a file during the removal.
for _ in 1 2 3; do
    ls -A | grep -vxF "$mark" | while IFS= read -r name; do
        # Users may have taken away their own permissions to write.
        rm -rf -- "$name" 2>/dev/null || { chmod -R u+rwX -- "$name" && rm -rf -- "$name"; } 2>/dev/null
    done
    [ -n "$(ls -A | grep -vxF "$mark")" ] || break
    sleep 0.2
done
if [ -z "$(ls -A | grep -vxF "$mark")" ]; then
    rm -f -- "$mark"
    cd / && rmdir -- "$folder"
fi
[ ! -e "$folder" ] || find "$folder" 2>/dev/null | head -n 20 | sed 's/^/left\t/'
