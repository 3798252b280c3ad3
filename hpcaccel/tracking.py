"""Accelerate's import path for trackers; see ``hpcaccel.runtime.tracking``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.tracking.catalog import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from hpcaccel.runtime.tracking.catalog import filter_trackers as filter_trackers
from hpcaccel.runtime.tracking.catalog import get_available_trackers as get_available_trackers
from hpcaccel.runtime.tracking.catalog import register_tracker_class as register_tracker_class
from hpcaccel.runtime.tracking.clearml import ClearMLTracker as ClearMLTracker
from hpcaccel.runtime.tracking.file_trackers import AimTracker as AimTracker
from hpcaccel.runtime.tracking.file_trackers import DVCLiveTracker as DVCLiveTracker
from hpcaccel.runtime.tracking.file_trackers import TensorBoardTracker as TensorBoardTracker
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker as GeneralTracker
from hpcaccel.runtime.tracking.general_tracker import on_main_process as on_main_process
from hpcaccel.runtime.tracking.hosted_trackers import CometMLTracker as CometMLTracker
from hpcaccel.runtime.tracking.hosted_trackers import SwanLabTracker as SwanLabTracker
from hpcaccel.runtime.tracking.hosted_trackers import TrackioTracker as TrackioTracker
from hpcaccel.runtime.tracking.hosted_trackers import WandBTracker as WandBTracker
from hpcaccel.runtime.tracking.mlflow import MLflowTracker as MLflowTracker

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
