"""The implementations, by family, and the registry that lists them."""

from keraunos.kernels.registry import Backend, Platform, UnsupportedError, detect_platform, kernel_registry

__all__ = ["Backend", "Platform", "UnsupportedError", "detect_platform", "kernel_registry"]
