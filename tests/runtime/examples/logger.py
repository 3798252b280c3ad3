"""``get_logger``: one line for all ranks, or one from each rank."""

import logging
import sys

from accelerate import Accelerator
from accelerate.logging import get_logger

logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO, stream=sys.stdout)
logger = get_logger(__name__)
accelerator = Accelerator()
logger.info("training begins")
logger.info("each speaks", main_process_only=False, in_order=True)
