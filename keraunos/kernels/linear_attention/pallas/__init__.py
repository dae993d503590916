"""Linear attention on Hopper GPUs, in Pallas Mosaic GPU: host code is in `passes.py`, kernels in the other files."""
