# Runs on the controller: fetch BASE STORE [ARGUMENT...]. Reads lines of a lock file, with a wheel each, up to an empty
# line. BASE's pip downloads wheels that STORE (in the home folder) lacks, with these arguments. Prints the hashes of all
# wheels that are in the store then. After a failed download, it continues only if the package index answers.
set -eu
umask 077
base=$1 store=$HOME/$2
shift 2
mkdir -p -- "$store/partial"
new=$(mktemp -d -- "$store/partial/fetch.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
export TMPDIR="$new" # /tmp may be in memory
while read -r line && [ -n "$line" ]; do
    sha=${line#*sha256:}
    sha=${sha%% *}
    folder=$store/$(printf %.2s "$sha")
    if [ ! -f "$folder/$sha" ]; then
        printf '%s\n' "$line" >"$new/requirements.lock"
        if ! "$base/bin/python" -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --no-cache-dir \
            --disable-pip-version-check --no-input --progress-bar=off --retries=2 --dest="$new/wheels" \
            "$@" --requirement="$new/requirements.lock" </dev/null >/dev/null 2>&1; then
            curl -fsS -o /dev/null --max-time 15 https://pypi.org/simple/pip/ 2>/dev/null || break
            continue
        fi
        mkdir -p -- "$folder"
        mv -f -- "$new"/wheels/*.whl "$folder/$sha"
    fi
    echo "$sha"
done
