# Runs on the controller: fetch BASE STORE [ARGUMENT...]. Reads lines of a lock up to an empty one, a wheel each; has BASE's
# pip, with these arguments, download those that STORE (below the home) lacks, by their hashes. Says the hash of each
# that is there then. Where pip can't have one, the next is tried only if the package index answers.
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
