"""Joins the other ranks, and prints one JSON line per rank."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.states.partial_state import PartialState

if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0":
    time.sleep(float(os.environ.get("LATE", "0")))
words = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if "timeout" in words:
    from datetime import timedelta

    words["timeout"] = timedelta(seconds=words["timeout"])
try:
    state = PartialState(cpu=True, **words)
except RankEnvironmentError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit(2)
total = torch.tensor([10.0**state.process_index])
dist.all_reduce(total)
print(json.dumps({"rank": state.process_index, "sum": total.item(), "job": os.environ.get("SLURM_JOB_ID", "")}))
state.destroy_process_group()
