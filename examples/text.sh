#!/usr/bin/env bash
# Train a small GPT on a text, and let it write: on the cluster, then on this machine, which needs no cluster.
#
# examples/text.sh
set -euo pipefail
id_of() { python3 -c 'import json, sys; print(json.load(sys.stdin)["job_id"])'; }

clusterctl put LICENSE datasets
job=$(clusterctl -o json submit train --wait -- --model gpt-tiny --data text:~/datasets/LICENSE \
    --optimizer adamw --lr 0.003 --iterations "${ITERATIONS:-300}" --epochs 100 | id_of)
clusterctl submit sample --run "$job" --follow -- --prompt 'You may' --tokens 100
clusterctl collect "$job"
clusterctl submit sample --run "$job" --local -- --prompt 'You may' --temperature 0.8 --top-k 20
