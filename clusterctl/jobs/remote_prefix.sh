# Runs on the cluster: prefix WANTED. Prints the folder of the environment WANTED, and a line with the release of its
# Python, or an empty line. WANTED is a folder, or the name of an environment of conda. The exit status is 3 if there is
# no such environment, 4 if its Python does not run, 5 if several environments have the name; then stdout lists them.
wanted=$1
found=

candidates() {
    for folder in "${MAMBA_ROOT_PREFIX:-$HOME/micromamba}" "$HOME/.conda" "$HOME/miniconda3" "$HOME/miniforge3" \
        "$HOME/mambaforge" "$HOME/anaconda3"; do
        printf '%s\n' "$folder/envs/$wanted"
    done
    # conda lists the environments of a user in this file, wherever they are.
    while read -r folder; do
        [ "${folder##*/}" != "$wanted" ] || printf '%s\n' "$folder"
    done 2>/dev/null <"$HOME/.conda/environments.txt"
}

case $wanted in
    \~/*) found=$HOME/${wanted#??} ;;
    /*) found=$wanted ;;
    */*) found=$HOME/$wanted ;;
    *)
        found=$(candidates | sort -u | while read -r folder; do [ ! -d "$folder/bin" ] || printf '%s\n' "$folder"; done)
        ;;
esac
case $found in
    *"
"*) printf '%s\n' "$found"; exit 5 ;;
esac
[ -n "$found" ] && [ -d "$found/bin" ] && [ -x "$found/bin" ] || exit 3
printf '%s\n' "$found"
[ -e "$found/bin/python" ] || exit 0
"$found/bin/python" -IS -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' || exit 4
