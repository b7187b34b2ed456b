#!/bin/bash
# JupyterLab on a node, for the browser here. Its first lines say the address to open, with the token in it.
#     clusterctl submit examples/notebook.sh --requirements examples/requirements-notebook.txt --time 2h
# What it listens on is the node's own loopback: reach it through SSH (see docs/environments.md).
set -euo pipefail
exec jupyter lab --no-browser --ip=127.0.0.1 --port="${1:-8888}" --ServerApp.root_dir="$HOME"
