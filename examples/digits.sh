#!/usr/bin/env bash
# Train on handwritten digits, evaluate the model on the cluster, and classify digits with it on this machine.
#
# examples/digits.sh
set -euo pipefail
id_of() { python3 -c 'import json, sys; print(json.load(sys.stdin)["job_id"])'; }

job=$(clusterctl -o json submit train --nodes 2 --wait -- --epochs 10 | id_of)
clusterctl submit eval --run "$job" --follow
clusterctl collect "$job"
clusterctl submit predict --run "$job" --local -- examples/digits.csv
