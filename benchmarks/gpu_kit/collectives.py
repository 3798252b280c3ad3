"""A rank of two on one GPU: what the Accelerator's collectives give for CUDA tensors, over gloo."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator, InitProcessGroupKwargs
from hpcaccel.utils import broadcast_object_list, gather_object


def main() -> None:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    mine = torch.full((2,), float(rank), device=device)
    assert accelerator.gather(mine).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert accelerator.gather(mine).device == device
    assert accelerator.reduce(mine, "mean").tolist() == [0.5, 0.5]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    assert padded.shape == (2,)
    assert padded.device == device
    assert gather_object([rank]) == [0, 1]
    assert broadcast_object_list([rank, "text"]) == [0, "text"]

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    seen = 0
    for x, y in loader:
        assert x.device == device
        accelerator.backward((model(x) - y).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(y))
    assert seen == 30, seen
    weights = accelerator.gather(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert torch.equal(weights[:5], weights[5:])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(f"{size} ranks on {device}: gather, reduce, pad, objects, DDP, gather_for_metrics")
    accelerator.end_training()


if __name__ == "__main__":
    main()
