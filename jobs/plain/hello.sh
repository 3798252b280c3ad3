#!/usr/bin/env bash
# Any program can be a job. Each rank runs this script.
set -euo pipefail
echo "rank $RANK of $WORLD_SIZE on $(hostname), local rank $LOCAL_RANK, arguments: $*"
