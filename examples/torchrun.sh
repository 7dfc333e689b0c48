#!/usr/bin/env bash
# The same script on one node and on two, started by torchrun; the flags of the script stay as they are.
#
#   examples/torchrun.sh --strategy fsdp                                     one node
#   NNODES=2 HEAD=10.0.0.1:29500 examples/torchrun.sh --strategy hsdp        on each of two nodes, same command
#
# NPROC   processes per node                          HEAD    address:port of one node, reachable by all
# NNODES  number of nodes, or MIN:MAX                 JOB     any name, the same on all nodes
set -euo pipefail

exec torchrun \
    --nproc_per_node="${NPROC:-2}" \
    --nnodes="${NNODES:-1}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="${HEAD:-127.0.0.1:0}" \
    --rdzv_id="${JOB:-polyphase}" \
    "$(dirname "$0")/gpt.py" "$@"
