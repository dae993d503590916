"""Linear attention on TPUs, in Pallas: `passes.py` is host code, `kernels.py` walks chunks, `decays.py` is one chunk."""
