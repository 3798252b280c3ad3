"""A randomly initialised model of transformers as a pipeline: NAME is Bert, GPT2 or Llama. As the whole model."""

import sys

import torch
import transformers
from torch.utils._pytree import tree_leaves

from hpcaccel import PartialState, prepare_pippy

LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES = {
    "Bert": {**LAYERS, "max_position_embeddings": 16},
    "GPT2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "pad_token_id": 0},
    "Llama": LAYERS,
}
HEADS = {"Bert": "ForMaskedLM", "GPT2": "ForSequenceClassification", "Llama": "ForCausalLM"}

state = PartialState(cpu=True)
name = sys.argv[1]


def made():
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **SIZES[name])
    return getattr(transformers, name + HEADS[name])(config)


def batch(rows):
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 50, (rows, 12), generator=draw)
    mask = (torch.arange(12) < torch.randint(3, 13, (rows, 1), generator=draw)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


whole = made().eval()
whole.config.use_cache = False  # a pipeline returns no keys and values
model = prepare_pippy(made(), example_kwargs=batch(2), gather_output=True).eval()
print(model.hf_split_points, flush=True)
assert all(".layer" in point or ".h." in point for point in model.hf_split_points)
for rows in (2, 5):
    found = model(**batch(rows))
    with torch.no_grad():
        right = whole(**batch(rows))
    assert type(found) is type(right)
    assert found.keys() == right.keys()
    torch.testing.assert_close(found.logits, right.logits)
    torch.testing.assert_close(tree_leaves(found), tree_leaves(right))
assert getattr(model.config, "use_cache", None) is getattr(made().config, "use_cache", None)
state.wait_for_everyone()
