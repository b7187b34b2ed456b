# Runs on the login node: claim FOLDER ID CLUSTER, after remote_folder.sh. Creates the folder and writes its mark, unless
# it has a mark. CLUSTER: Slurm's ClusterName. Prints lines of a name, a tab and a value: the folder's path, the id and the
# ClusterName in the mark, and the environments. A folder with other files and without a mark is left as it is, and `mark`
# is empty. Of a path that needs quotes, only `folder` is printed.
case $folder in
*[!A-Za-z0-9._/+@-]*) printf 'folder\t%s\n' "$folder" && exit 0 ;;
esac
umask 077
set -e
if [ ! -s "$folder/$mark" ] && [ -z "$(list_files)" ]; then
    if ! find_moved_mark "$2"; then
        above=$folder count=0
        until [ -d "$above" ]; do
            above=$(dirname -- "$above")
            count=$((count + 1))
        done
    fi
    # The disk may be full.
    { printf '%s\n' "$2" "$count" "$3" >"$above/$mark-$2" && mkdir -p -- "$folder"; } ||
        { remove_created "$2" && exit 1; }
    mv -f -- "$above/$mark-$2" "$folder/$mark"
fi
cd -- "$folder"
printf 'folder\t%s\nmark\t%s\ncluster\t%s\n' "$(pwd)" "$(sed -n 1p "$mark" 2>/dev/null)" "$(sed -n 3p "$mark" 2>/dev/null)"
printf 'environments\t%s\n' "$(cd environments 2>/dev/null && printf '%s ' *)"
