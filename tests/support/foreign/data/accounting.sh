# The database, and accounts by Slurm's page on accounting: jobs need account proj1, the default account takes none.
chown slurm: /etc/slurm/slurmdbd.conf
chmod 600 /etc/slurm/slurmdbd.conf
systemctl start mariadb
mariadb -e "create database slurm_acct_db; create user slurm@localhost identified by 'site';
    grant all on slurm_acct_db.* to slurm@localhost"
systemctl start slurmdbd
timeout 60 sh -c 'until sacctmgr -n show cluster >/dev/null 2>&1; do sleep 0.2; done'
sacctmgr -i add cluster national >/dev/null
sacctmgr -i add account proj1 Description=project Organization=site >/dev/null
sacctmgr -i add account nobody Description=default Organization=site GrpSubmitJobs=0 >/dev/null
sacctmgr -i add qos long,brief >/dev/null
for user in stud carla finn; do
    sacctmgr -i add user "$user" DefaultAccount=nobody Account=nobody >/dev/null
    sacctmgr -i add user "$user" Account=proj1 MaxJobs=4 MaxSubmitJobs=20 >/dev/null
done
