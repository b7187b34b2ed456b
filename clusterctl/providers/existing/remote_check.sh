# Runs on the login node: check FOLDER, after remote_folder.sh. Prints the damaged environments and Pythons in the folder.
list_damaged
