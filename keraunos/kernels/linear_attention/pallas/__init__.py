"""Linear attention on TPUs, in Pallas: `passes.py` is host code, `kernels.py` walks, `decays.py` is one chunk."""
