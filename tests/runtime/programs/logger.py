"""Ranks that log: before the rendezvous, on the main process only, on all ranks, and in order."""

from __future__ import annotations

import logging
import time

from hpcaccel import Accelerator
from hpcaccel.logging import get_logger

logging.basicConfig(format="%(levelname)s %(filename)s:%(lineno)d %(message)s @%(created).6f", level=logging.INFO)
logger = get_logger(__name__)
logger.info("before, on one")
logger.info("before, on all", main_process_only=False)
logger.info("before, in order", in_order=True)

accelerator = Accelerator(cpu=True)
logger.info("one of %d", accelerator.num_processes)
logger.info("all", main_process_only=False)
for index in range(3):
    if accelerator.process_index == 0:
        time.sleep(0.05)  # a rank that does not wait for its turn would be first
    logger.info("turn %d", index, in_order=True)
if accelerator.process_index == 1:
    logger.logger.setLevel(logging.ERROR)
logger.info("hidden on one rank", in_order=True)
accelerator.end_training()
logger.info("after the end")
