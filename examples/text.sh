#!/usr/bin/env bash
# Train an LSTM on a text, then generate text with it: on the cluster, and on this machine without a cluster.
#
# examples/text.sh
set -euo pipefail
id_of() { python3 -c 'import json, sys; print(json.load(sys.stdin)["job_id"])'; }

clusterctl put examples/LICENSE datasets
job=$(clusterctl -o json submit train --wait -- --data text:~/datasets/LICENSE --model lstm --layers 1 --width 128 \
    --sequence-length 32 --global-batch-size 16 --optimizer adamw --lr 0.01 --epochs 15 | id_of)
clusterctl submit sample --run "$job" --follow -- --prompt 'You may' --tokens 100
clusterctl collect "$job"
clusterctl submit sample --run "$job" --local -- --prompt 'You may' --temperature 0.5 --top-k 20
