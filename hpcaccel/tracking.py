"""Accelerate's import path of trackers, which live in ``hpcaccel.runtime.tracking``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.tracking.aim import AimTracker as AimTracker
from hpcaccel.runtime.tracking.catalog import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from hpcaccel.runtime.tracking.catalog import filter_trackers as filter_trackers
from hpcaccel.runtime.tracking.catalog import get_available_trackers as get_available_trackers
from hpcaccel.runtime.tracking.catalog import register_tracker_class as register_tracker_class
from hpcaccel.runtime.tracking.clearml import ClearMLTracker as ClearMLTracker
from hpcaccel.runtime.tracking.comet import CometMLTracker as CometMLTracker
from hpcaccel.runtime.tracking.dvclive import DVCLiveTracker as DVCLiveTracker
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker as GeneralTracker
from hpcaccel.runtime.tracking.general_tracker import on_main_process as on_main_process
from hpcaccel.runtime.tracking.mlflow import MLflowTracker as MLflowTracker
from hpcaccel.runtime.tracking.swanlab import SwanLabTracker as SwanLabTracker
from hpcaccel.runtime.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
from hpcaccel.runtime.tracking.trackio import TrackioTracker as TrackioTracker
from hpcaccel.runtime.tracking.wandb import WandBTracker as WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
