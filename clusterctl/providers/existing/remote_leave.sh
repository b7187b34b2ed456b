# Runs on the login node: leave FOLDER NODES SCRIPT_BYTES. Reads the proof's script and a file for it, and lets the first
# job on NODES nodes run the script. This job and later jobs load the modules that worked. `attach` and `detach` remove
# both, as they do after a proof that was killed.
set -e
umask 077
cd -- "$1"
rm -rf -- proof.queued proof.active
mkdir proof.queued
head -c "$3" >proof.queued/proof.sh
cat >proof.queued/probe.json
cat >>job-profile.sh <<END
# No job has shown yet that MPI programs run on this cluster, so the first job does it.
if [ "\${SLURM_JOB_NUM_NODES:-0}" -ge $2 ] && mv -T -- $1/proof.queued $1/proof.active 2>/dev/null; then
    echo "\$SLURM_JOB_ID" >$1/proof.active/job
    SLURM_SUBMIT_DIR=$1/proof.active SLURM_NTASKS=\$SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE=1 \\
        timeout -k 90 300 bash $1/proof.active/proof.sh >$1/proof.active/output 2>&1 </dev/null || true
fi
for module in \$(awk -F '\t' '\$1 == "works" {print \$2}' $1/proof.active/facts 2>/dev/null); do
    clusterctl_path=\$PATH
    type module >/dev/null 2>&1 || { . /etc/profile >/dev/null 2>&1; PATH=\$clusterctl_path:\$PATH; }
    module load "\$module"
done
unset -v module clusterctl_path
END
