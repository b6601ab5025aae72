#!/bin/bash
# A run on the cluster's head, eight players wherever Ray has room: bash examples/cluster/ray_job.sh
# `$RAY_ADDRESS` is the dashboard's, such as http://127.0.0.1:8265; agentrl-gym[ray] is installed on all nodes.
set -euo pipefail

ray job submit --working-dir . --entrypoint-num-cpus 2 \
    --runtime-env-json "{\"env_vars\": {\"AGENTRL_PLAYER_KEY\": \"$(openssl rand -hex 24)\", \"AGENTRL_PLAYER_CPUS\": \"2\"}}" -- \
    agentrl train --env math-tools --players 8 --players.launcher ray --players.host 0.0.0.0
