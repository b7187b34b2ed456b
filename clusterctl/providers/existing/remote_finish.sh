# Runs on the login node: finish FOLDER KEY. Writes the standard input to the script that jobs source first, and makes
# the environment KEY, unless it is empty, the environment of all jobs in FOLDER.
set -e
umask 077
cd -- "$1"
cat >.job-profile.new
mv -f -- .job-profile.new job-profile.sh
[ -n "$2" ] || exit 0
ln -sfn -- "environments/$2" .env.new
mv -fT -- .env.new env
