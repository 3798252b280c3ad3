"""Accuracy over all ranks, counted correctly although the samples are not divisible by the ranks."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
labels = torch.arange(103) % 3
loader = DataLoader(TensorDataset(torch.eye(3)[torch.where(torch.arange(103) < 100, labels, 0)], labels), batch_size=8)
model, loader = accelerator.prepare(nn.Identity(), loader)

model.eval()
right, seen, words = 0, 0, []
for inputs, references in loader:
    with torch.no_grad():
        predictions = model(inputs).argmax(dim=-1)
    predictions, references = accelerator.gather_for_metrics((predictions, references))
    right += int((predictions == references).sum())
    seen += len(references)
    words += accelerator.gather_for_metrics([f"label {int(label)}" for label in references[:1]], use_gather_object=True)
accelerator.print(f"{right} of {seen} right")
