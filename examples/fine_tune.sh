#!/usr/bin/env bash
# Train on a text, continue with these weights on another text, and generate text with the model.
#
# examples/fine_tune.sh
set -euo pipefail
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
train() {
    clusterctl -o json submit train --wait -- --model lstm --layers 1 --width 128 --sequence-length 32 \
        --global-batch-size 16 --optimizer adamw "$@"
}

clusterctl put examples/LICENSE examples/README.md datasets
base=$(train --data text:~/datasets/LICENSE --lr 0.01 --epochs 10 | field dir)
tuned=$(train --data text:~/datasets/README.md --lr 0.003 --epochs 10 --init "$base/files/model" | field job_id)
clusterctl logs "$tuned"
clusterctl submit sample --run "$tuned" --follow -- --prompt 'clusterctl' --tokens 100
