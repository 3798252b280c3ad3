"""An older import path of Accelerate's."""

__all__ = []
