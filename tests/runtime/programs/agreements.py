"""Each rank issues its part of every agreement in argv[1] and prints the decisions."""

import json
import sys

import torch.distributed as dist

from hpcaccel.runtime.training.stop_agreement import StopAgreement

dist.init_process_group("gloo")
agreement = StopAgreement(dist.group.WORLD)
found = []
for parts in json.loads(sys.argv[1]):
    agreement.issue(**{"stop": False, "save": False, **parts[dist.get_rank()]})
    decision = agreement.read()
    assert decision is not None
    found.append({**decision._asdict(), "times": agreement.times})
    agreement.times = []
print(json.dumps(found))
dist.destroy_process_group()
