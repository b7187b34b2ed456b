# Runs on the cluster: build KEY BASE WAIT_S HELD ENVIRONMENTS PYTHON. Builds the environment ENVIRONMENTS/KEY on top
# of the environment BASE with the Python PYTHON. With BASE "", it builds a BASE, whose wheels contain pip. Relative
# paths start at the home folder. SHA256SUMS in ENVIRONMENTS/KEY has the files that it was built with; it is built again
# if one of them was removed or changed. Reads lines `NAME FILE` up to an empty line: wheels in the store, and finally the lock
# file, without which nothing is installed. The build has a temporary folder; KEY is a link to it that is created at
# the end. All builds share a lock, so that leftovers of killed builds can be removed, and environments that were unused for 180 days. The exit status is HELD if
# the lock is not free within WAIT_S.
set -eu
umask 077
key=$1 base=$2 wait_s=$3 held=$4 environments=$5 python=$6
# A site may set these for its users. Quotes would join the names.
# shellcheck disable=SC2046
unset PYTHONHOME PYTHONPATH $(env | sed -n 's/^\(PIP_[A-Z0-9_]*\)=.*/\1/p')
cd
mkdir -p -- "$environments"
cd -- "$environments"
if [ -L .lock ] || { [ -e .lock ] && [ ! -f .lock ]; }; then rm -rf -- .lock; fi
exec 9<>.lock
flock --nonblock 9 || { echo waiting; flock --timeout "$wait_s" 9 || exit "$held"; }
if [ -e "$key/SHA256SUMS" ] && (cd -- "$key" && sha256sum --check --strict --status SHA256SUMS) 2>/dev/null; then exit 0; fi
for old in .*.??????; do
    name=${old#.}
    name=${name%.*}
    [ "$(readlink -- "$name")" = "$old" ] || rm -rf -- "$old"
done
# Submissions set the times of these files. A job may wait or run for long after its submission.
find . -mindepth 2 -maxdepth 2 -name requirements.lock -mtime +180 | while read -r unused; do
    old=$(basename -- "${unused%/*}")
    # Others are the base of environments.
    find "$old" -name clusterctl-base.pth | grep -q . || continue
    name=${old#.}
    rm -f -- "${name%.*}"
    rm -rf -- "$old"
done
new=$(mktemp -d -- ".$key.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
echo building
mkdir -- "$new/wheels"
while read -r name file && [ -n "$name" ]; do ln -s -- "$file" "$new/wheels/$name"; done
cp -- "$new/wheels/requirements.lock" "$new"
"$python" -m venv --without-pip "$new"
if [ -n "$base" ]; then
    site=$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import site; site.addsitedir("%s")\n' "$below" >"$site/clusterctl-base.pth"
    set -- "$base/bin/python" -m pip --python "$new/bin/python"
else
    # Python can run a program in an archive, and a wheel is an archive.
    for pip in "$new"/wheels/pip-*.whl; do set -- "$new/bin/python" "$pip/pip"; done
fi
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# pip runs other programs to describe the host to an index, and these may write to a home folder.
HOME="$PWD/$new/wheels" "$@" install --quiet --no-index --no-deps --no-compile \
    --no-cache-dir --require-hashes --find-links "$new/wheels" --requirement "$new/requirements.lock"
rm -rf -- "$new/wheels"
sums=$(cd -- "$new" && find . -type f -exec sha256sum {} +)
printf '%s\n' "$sums" >"$new/SHA256SUMS"
sync -f -- "$new"
ln -sfn -- "$new" ".$key.link"
mv -fT -- ".$key.link" "$key"
trap - EXIT
