#!/usr/bin/env bash
# Any program is a job: every rank runs this.
set -euo pipefail
echo "rank $RANK of $WORLD_SIZE on $(hostname), local rank $LOCAL_RANK, arguments: $*"
