"""The implementations, by family, and the registry that lists them."""

from keraunos.kernels.families import FAMILIES
from keraunos.ops.invocation import Backend, Platform, UnsupportedError
from keraunos.ops.registry import detect_platform, kernel_registry

__all__ = ["FAMILIES", "Backend", "Platform", "UnsupportedError", "detect_platform", "kernel_registry"]
