# Runs on the cluster: kept FOLDER. Prints for the environments, builds, images and the store in FOLDER of the home folder a
# line with its name, the number of its entries, and its size in KiB; "-" if that takes more than 3 s to find out.
cd
cd -- "$1" 2>/dev/null || exit 0
# size NAME NUMBER
size() {
    kib=$(timeout 3 du -sk -- "$1" 2>/dev/null) || kib=-
    echo "$1 $2 ${kib%%[!0-9-]*}"
}
# Names that begin with a dot are incomplete, or the folders that the others lead to.
[ ! -d environments ] || size environments "$(find environments -mindepth 1 -maxdepth 1 -type l ! -name '.*' | wc -l)" &
[ ! -d pythons ] || size pythons "$(find pythons -mindepth 1 -maxdepth 1 -type d ! -name '.*' | wc -l)" &
[ ! -d builds ] || size builds "$(find builds -mindepth 1 -maxdepth 1 -type d ! -name '.*' | wc -l)" &
[ ! -d images ] || size images "$(find images -mindepth 1 -maxdepth 1 ! -name '.*' ! -name layers | wc -l)" &
[ ! -d store ] || size store "$(find store/?? -mindepth 1 -maxdepth 1 -type f 2>/dev/null | wc -l)" &
wait
