"""Runs train.py, which lies beside it, on CPUs and with a stand-in for the package vLLM. Its arguments are train.py's.

Replaced are the names that TRL imports from vLLM, and the device for which TRL's client checks: it refuses to send
weights from a CPU. The weights go through a TCP connection. It is formed like vLLM's NCCL group: the trainer posts its
address to the server, and is rank 0, which listens.
"""

import importlib.machinery
import os
import runpy
import socket
import sys
import types

import torch


def stand_in(name, **names):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(names)
    sys.modules[name] = module


def trainer_init(init_info):
    with socket.create_server((init_info["master_address"], init_info["master_port"])) as listening:
        listening.settimeout(120)
        connection, _ = listening.accept()
    return types.SimpleNamespace(group=types.SimpleNamespace(store=None, socket=connection))


def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    for item in iterator:
        tensor = post_iter_func(item).contiguous()
        group.group.socket.sendall(tensor.view(torch.uint8).numpy().tobytes())


stand_in("vllm", __version__="0.31.0", LLM=None, RequestOutput=None, SamplingParams=None)
stand_in("vllm.sampling_params", StructuredOutputsParams=None)
stand_in("vllm.utils.network_utils", get_ip=lambda: os.environ["MASTER_ADDR"])
stand_in("vllm.distributed.weight_transfer.nccl_common", trainer_init=trainer_init)
stand_in(
    "vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=packed_nccl_broadcast_producer
)

from trl.generation.vllm_client import VLLMClient  # noqa: E402

init_communicator = VLLMClient.init_communicator
setattr(VLLMClient, "init_communicator", lambda client, device: init_communicator(client, "cuda"))  # noqa: B010

runpy.run_module("train", run_name="__main__", alter_sys=True)
