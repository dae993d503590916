"""The version of this package: its only home."""

__version__ = "0.1.0"
