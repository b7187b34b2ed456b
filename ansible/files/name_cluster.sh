#!/bin/sh
# Names the cluster in the accounting database of a controller that starts from a template: $1 becomes the ClusterName of
# slurm.conf. Then deletes itself. If it was interrupted, it can run again.
# Slurm has tables for each cluster, whose names begin with the cluster's; table_defs_table has a definition of each.
set -eu
name=$(sed -n 's/^ClusterName=//p' /etc/slurm/slurm.conf)
: "${name:?slurm.conf has no ClusterName}"
mariadb slurm_acct_db <<END
UPDATE cluster_table SET name = '$name' WHERE name = '$1';
UPDATE table_defs_table SET table_name = REPLACE(table_name, '$1', '$name'),
    definition = REPLACE(definition, '$1', '$name') WHERE table_name LIKE '"$1_%';
SET @renames = (SELECT GROUP_CONCAT('\`', table_name, '\` TO \`', REPLACE(table_name, '$1', '$name'), '\`')
    FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE '$1_%');
EXECUTE IMMEDIATE IFNULL(CONCAT('RENAME TABLE ', @renames), 'DO 0');
END
rm "$0"
