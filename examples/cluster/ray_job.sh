#!/bin/bash
# A whole run wherever Ray has room: two ranks, two servers, eight players: bash examples/cluster/ray_job.sh
# `$RAY_ADDRESS` is the dashboard's, such as http://127.0.0.1:8265; agentrl-gym[ray,vllm] is installed on all nodes, and
# /shared is a disk that all of them have.
set -euo pipefail

ray job submit --working-dir . --entrypoint-num-cpus 1 \
    --runtime-env-json "{\"env_vars\": {\"AGENTRL_PLAYER_KEY\": \"$(openssl rand -hex 24)\", \"AGENTRL_PLAYER_CPUS\": \"2\"}}" -- \
    agentrl train --launcher ray --ranks 2 --servers 2 --players 8 --env math-tools --run.dir /shared/runs/one \
    --run.resume true
