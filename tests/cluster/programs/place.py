"""Find this process's rank, sum over all ranks, and write the results to <folder>/<case>.<rank>.json."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.device_mesh import count_gpus
from hpcaccel.runtime.states.partial_state import PartialState

folder, case = Path(sys.argv[1]), sys.argv[2]
found: dict[str, Any] = {"gpus": count_gpus(os.environ), "scontrol": shutil.which("scontrol") is not None}
who = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
try:
    state = PartialState()
except RankEnvironmentError as error:
    (folder / f"{case}.{who}.json").write_text(json.dumps({"error": str(error)}))
    sys.exit(2)
env = state._world.env
found |= {"place": [env.rank, env.world_size, env.local_rank, env.local_world_size], "source": env.source}
total = torch.tensor(10.0**env.rank, dtype=torch.float64)
if env.world_size > 1:
    dist.all_reduce(total)
found |= {"sum": total.item(), "address": env.master_addr, "host": os.uname().nodename}
(folder / f"{case}.{env.rank}.json").write_text(json.dumps(found))
state.destroy_process_group()
