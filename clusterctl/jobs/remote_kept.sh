# Runs on the cluster: kept FOLDER SECONDS [NAME ENTRIES...]. Prints lines `number NAME N` with the number of entries of the
# folder NAME in FOLDER of the home folder, which `find` selects by the arguments ENTRIES, and `kib NAME K` with its size.
# Sizes that are not known after SECONDS are not printed. Names that begin with a dot are incomplete, locks, or the folders
# that other names lead to.
cd
cd -- "$1" 2>/dev/null || exit 0
seconds=$2 names=
shift 2
# The arguments of find have patterns.
set -f
while [ $# -gt 1 ]; do
    if [ -d "$1" ]; then
        names="$names $1"
        # shellcheck disable=SC2086
        echo "number $1 $(find "$1" $2 ! -name '.*' 2>/dev/null | wc -l)"
    fi
    shift 2
done
# shellcheck disable=SC2016,SC2086
timeout "$seconds" sh -c '
    for name; do
        { kib=$(du -sk -- "$name" 2>/dev/null); echo "kib $name ${kib%%[!0-9]*}"; } &
    done
    wait
' kept $names
