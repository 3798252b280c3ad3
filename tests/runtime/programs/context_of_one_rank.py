"""Context parallelism with one rank that differs from the others. Argument: ``length``, ``rows`` or ``values`` of its
buffer; or ``draws``, where a dataset draws random numbers and each rank has a seed of its own."""

import json
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.utils import ParallelismConfig, set_seed

case = sys.argv[1]
accelerator = Accelerator(cpu=True, strategy="ddp", parallelism_config=ParallelismConfig(cp_size=2))


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


if case == "draws":
    set_seed(accelerator.process_index)
    _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(Noise(), batch_size=2))
    drawn = accelerator.gather(torch.cat(list(loader)).reshape(1, -1)).tolist()
    if accelerator.is_main_process:
        print(json.dumps({"drawn": drawn}), flush=True)
else:
    differs = accelerator.process_index == 1
    shape = (3 if differs and case == "rows" else 2, 15 if differs and case == "length" else 16)
    tokens = torch.full(shape, int(differs and case == "values"))
    try:
        with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            raise AssertionError("the block has begun")
    except RuntimeMisuse as error:
        print(error, flush=True)
accelerator.wait_for_everyone()
accelerator.end_training()
