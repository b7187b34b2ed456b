# Only a login shell that reads all of /etc/profile finds the site's modules.
export MODULEPATH=/opt/site/modulefiles:${MODULEPATH:-}
