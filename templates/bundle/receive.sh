#!/bin/sh
# Print `there` if the bundle already exists; otherwise print `send` and unpack a tar from standard input.
set -eu
umask 077
folder=$1 digest=$2
if [ -e "$folder/$digest" ]; then echo there; exit; fi
rm -rf -- "$folder" "$folder".??????
new=$(mktemp -d -- "$folder.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
echo send
tar -xf - -C "$new" --no-same-owner --no-same-permissions
mv -- "$new" "$folder"
cd -- "$folder"
sh -eu prepare >&2
touch -- "$digest"
