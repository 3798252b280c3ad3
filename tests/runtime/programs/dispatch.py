"""Dispatched loaders: rank 0 prints what every rank receives, as one JSON line."""

import json
import warnings

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpcaccel import Accelerator
from hpcaccel.errors import HpcaccelError
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse


class Hooks:
    finishing = False
    finished_epochs_are_over = False
    step = 0

    def step_is_over(self):
        pass

    def restore_rng(self):
        pass

    def loop_is_entered(self):
        pass

    def loop_is_left(self):
        pass


class Stream(IterableDataset):
    def __init__(self, items, fails=False):
        self.items = items
        self.fails = fails

    def __iter__(self):
        assert accelerator.is_main_process, "only one rank reads"
        yield from self.items
        if self.fails:
            raise OSError("the disk is gone")


accelerator = Accelerator(cpu=True)
group = accelerator._session.group
rank, size = group.rank, group.world_size


def prepared(loader, **options):
    return PreparedLoader(loader, group=group, in_use=LoadersInUse(), hooks=Hooks(), seed=1, **options)


def everybody(value):
    box = [None] * size
    torch.distributed.all_gather_object(box, value)
    return box


def read(loader):
    return everybody(
        [[batch.tolist(), loader.batch_samples, loader.valid_in_batch, loader.at_last_batch] for batch in loader]
    )


def misuse(make):
    try:
        for _ in make():
            pass
    except (HpcaccelError, OSError) as error:
        return everybody(f"{type(error).__name__}: {error}")
    return everybody("no error")


found = {}
for samples in (8, 9, 3, 1):
    for split in (False, True):
        for drop in (False, True):
            loader = DataLoader(Stream(range(samples)), batch_size=2, drop_last=drop)
            found[f"{samples} {split} {drop}"] = read(prepared(loader, split_batches=split))
found["uneven"] = read(prepared(DataLoader(Stream(range(5)), batch_size=2), even_batches=False))

own = torch.Generator().manual_seed(3)
loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True, generator=own)
loader = prepared(loader, dispatch_batches=True)
order = torch.Generator().manual_seed(3)
torch.empty((), dtype=torch.int64).random_(generator=order)
found["map"] = everybody([batch[0].tolist() for batch in loader])
found["order"] = torch.randperm(10, generator=order).tolist()
found["length"] = len(loader)

rich = [
    {"x": torch.full((3,), float(n)), "n": n, "flag": n > 2, "text": f"s{n}", "none": torch.zeros(0)} for n in range(5)
]


def collate(samples):
    return {
        "x": torch.stack([sample["x"] for sample in samples]).bfloat16(),
        "flag": torch.tensor([sample["flag"] for sample in samples]),
        "text": [sample["text"] for sample in samples],
        "padded": [torch.zeros(len(samples), samples[0]["n"] + 1), torch.tensor(len(samples))],
        "none": torch.zeros(len(samples), 0),
    }


loader = prepared(DataLoader(Stream(rich), batch_size=1, collate_fn=collate))
found["rich"] = everybody(
    [
        [
            b["x"].tolist(),
            str(b["x"].dtype),
            b["flag"].tolist(),
            b["text"],
            list(b["padded"][0].shape),
            b["none"].shape[1],
        ]
        for b in loader
    ]
)

cut = accelerator.prepare_data_loader(
    DataLoader(Stream(range(8)), batch_size=4),
    slice_fn_for_dispatch=lambda batch, part, process_index=None, num_processes=None: batch[part] * 10 + process_index,
)
found["slice_fn"] = everybody([batch.tolist() for batch in cut])

ragged = DataLoader(
    Stream(range(4)), batch_size=2, collate_fn=lambda s: {"a": torch.zeros(len(s)), "b": torch.zeros(7)}
)
found["ragged"] = misuse(lambda: prepared(ragged, split_batches=True))
found["failed"] = misuse(lambda: prepared(DataLoader(Stream(range(6), fails=True), batch_size=1)))

stopped = prepared(DataLoader(Stream(range(16)), batch_size=2))
batches = iter(stopped)
for _ in range(2):
    next(batches)
state = stopped.state_dict()
batches.close()
resumed = prepared(DataLoader(Stream(range(16)), batch_size=2))
resumed.load_state_dict(state)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["resumed"] = everybody([batch.tolist() for batch in resumed])
found["warned"] = everybody([str(item.message) for item in caught if "read and discarded" in str(item.message)])

torch.manual_seed(rank)
synced = prepared(DataLoader(TensorDataset(torch.arange(4))), rng_types=["torch", "python", "numpy"])
next(iter(synced))
found["synced"] = everybody(torch.rand(1).item())
if rank == 0:
    print(json.dumps(found))
