"""Accelerate's ``utils``: all names of the pages in this folder, and for those that are not here the reason why."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.utils.constants import *
from hpcaccel.utils.dataclasses import *
from hpcaccel.utils.deepspeed import *
from hpcaccel.utils.environment import *
from hpcaccel.utils.imports import *
from hpcaccel.utils.memory import *
from hpcaccel.utils.modeling import *
from hpcaccel.utils.operations import *
from hpcaccel.utils.other import *
from hpcaccel.utils.random import *
from hpcaccel.utils.tqdm import *
from hpcaccel.utils.versions import *
