# Runs on the controller or login host: wheel BASE STORE NAME SUBFOLDER VERSION [MODULE...]. BASE's pip builds a wheel of
# the package in the archive whose path is the first line of stdin; its name is NAME. Further lines `NAME FILE`, up to an
# empty line, are the wheels that the build may use. The build has these modules, an empty home folder, a temporary folder
# and, if the kernel allows it, no network. Prints `wheel HASH NAME`: the wheel is in STORE then (a relative path
# starts at the home folder); or `failed`, and the end of pip's output.
set -eu
umask 077
base=$1 store=$2 name=$3 subfolder=$4 version=$5
shift 5
[ "${store#/}" != "$store" ] || store=$HOME/$store
# Quotes would join the names.
# shellcheck disable=SC2046
unset PYTHONHOME PYTHONPATH $(env | sed -n 's/^\(PIP_[A-Z0-9_]*\)=.*/\1/p')
if [ $# -gt 0 ]; then
    set +eu
    type module >/dev/null 2>&1 || . /etc/profile >/dev/null 2>&1
    for module; do
        module load "$module" >&2 || { echo failed; echo "the module $module can't be loaded"; exit 0; }
    done
    set -eu
fi
mkdir -p -- "$store/partial"
new=$(mktemp -d -- "$store/partial/wheel.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
mkdir -- "$new/wheels" "$new/home" "$new/temporary" "$new/built"
read -r archive
ln -s -- "$archive" "$new/$name"
while read -r wheel file && [ -n "$wheel" ]; do ln -s -- "$file" "$new/wheels/$wheel"; done
if [ -n "$version" ]; then export SETUPTOOLS_SCM_PRETEND_VERSION="$version"; fi
set -- "$base/bin/python" -m pip wheel --no-index --no-deps --no-cache-dir --progress-bar=off --find-links "$new/wheels" \
    --wheel-dir "$new/built" "file://$new/$name${subfolder:+#subdirectory=$subfolder}"
if unshare --user --net true 2>/dev/null; then set -- unshare --user --net "$@"; fi
if PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 NO_COLOR=1 HOME=$new/home \
    TMPDIR=$new/temporary "$@" </dev/null >"$new/log" 2>&1; then
    for built in "$new"/built/*.whl; do
        sha=$(sha256sum <"$built")
        sha=${sha%% *}
        folder=$store/$(printf %.2s "$sha")
        mkdir -p -- "$folder"
        chmod 400 -- "$built"
        mv -f -- "$built" "$folder/$sha"
        echo "wheel $sha ${built##*/}"
    done
else
    echo failed
    tail -c 20000 -- "$new/log"
fi
