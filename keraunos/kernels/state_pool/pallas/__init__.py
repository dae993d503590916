"""The serving functions on TPUs, in Pallas: `passes.py` is host code, `steps.py` the kernel."""
