#!/bin/bash
# A program with checkpoints of its own that saves when it gets SIGTERM and leaves with 0.
# Arguments: the number of steps, the seconds of each.
own=$HPCACCEL_RUN_DIR/own.json
step=$(cat "$own" 2>/dev/null || echo 0)
trap 'echo "$step" > "$own"; echo "left at $step"; exit 0' TERM
echo "from $step"
while [ "$step" -lt "$1" ]; do
    sleep "$2"
    step=$((step + 1))
    echo "{\"step\": $step, \"loss\": 1}" >> "$HPCACCEL_METRICS"
done
echo "$step" > "$own"
echo "left at $step"
