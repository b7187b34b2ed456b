# Runs on the login node: expand FOLDER, after remote_folder.sh. Prints the folder's path.
printf '%s\n' "$folder"
