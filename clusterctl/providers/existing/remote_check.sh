# Runs on the login node: check FOLDER [mend], after remote_folder.sh. Prints the damaged environments and Pythons in the
# folder. With `mend`, the next build of such an environment makes it again, and such a Python is no longer used.
list_damaged | while IFS= read -r built; do
    printf '%s\n' "$built"
    case $2$built in
    # Jobs that wait find the environment until then.
    mendenvironments/*) rm -f -- "$folder/$built/SHA256SUMS" ;;
    # Jobs that run may have it open.
    mendpythons/*) mv -T -- "$folder/$built" "$(mktemp -d -- "$folder/pythons/.new.XXXXXX")" ;;
    esac
done
