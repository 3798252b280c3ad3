"""Functions of torch_xla.core.xla_model. Collectives run on a gloo group of their own."""

from functools import cache

import torch.distributed as dist
from cpu_tensors import CALLS, GENERATOR

_seed = 0


@cache
def gloo():
    return dist.new_group(backend="gloo")


def get_rng_state(device=None):
    return _seed


def set_rng_state(seed, device=None):
    global _seed
    _seed = seed
    GENERATOR.manual_seed(seed)


def xla_device_hw(device):
    return "TPU"


def reduce_gradients(optimizer, groups=None, pin_layout=True):
    CALLS.append("reduce_gradients")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.held, group=gloo())
                parameter.grad.held.div_(dist.get_world_size())


def broadcast_master_param(model):
    CALLS.append("broadcast_master_param")
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.held, 0, group=gloo())
