#!/bin/sh
# Prints sections with a node's hardware as slurmd reports it, the output of NVIDIA's driver (if nvidia-smi is
# installed), and Slurm's MPI plugins. "known": the hardware is known, so slurmd is only called on GPU nodes.
PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin"
echo @node
has() { command -v "$1" >/dev/null 2>&1; }
if { [ "$1" != known ] || has nvidia-smi; } && has slurmd; then slurmd -C; else echo absent; fi
echo @gpus
if has nvidia-smi; then
    if said=$(timeout 30 nvidia-smi --query --xml-format 2>&1); then
        printf '%s\n' "$said" | grep -E -e '<(gpu id|product_name|current_mig|uuid|minor_number)|</gpu>' \
            -e '</?mig_device>|<(index|gpu_instance_id|compute_instance_id)>'
    else
        printf 'failed: %s\n' "$said" | head -n 1
    fi
    echo @mig
    timeout 30 nvidia-smi --list-gpus 2>/dev/null
    echo @minors
    cat /proc/driver/nvidia-caps/mig-minors 2>/dev/null
    echo @links
    timeout 30 nvidia-smi topo --matrix 2>/dev/null
    echo @cores
    lscpu --parse=CPU,SOCKET,CORE 2>/dev/null
fi
echo @mpi
for plugin in /usr/lib64/slurm/mpi_*.so /usr/lib/*/slurm*/mpi_*.so; do
    if [ -e "$plugin" ]; then plugin=${plugin##*/}; echo "${plugin%.so}"; fi
done
