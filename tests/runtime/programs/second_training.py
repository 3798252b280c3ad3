"""Two trainings in one program; the first argument is the verb of the second."""

import sys

import torch

from hpcaccel import Accelerator

accelerator = Accelerator()
for stage in range(2):
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    verbs = {"epochs": accelerator.epochs, "steps": accelerator.steps}
    for _ in range(3) if stage and sys.argv[1] not in verbs else verbs.get(sys.argv[1], accelerator.epochs)(3):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if not stage or sys.argv[1] == "checkpoint":
                accelerator.checkpoint()
    print("stage", stage, "trained", flush=True)
    accelerator.end_training()
