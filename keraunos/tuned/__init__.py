"""Configurations shipped with the package: <device>.json, written by `keraunos tune --ship`; see docs/tuning.md."""
