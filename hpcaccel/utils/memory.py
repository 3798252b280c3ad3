"""Accelerate's import path of what helps against too little memory."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__

__all__ = []
