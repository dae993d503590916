"""Softmax attention in Gluon, scheduled by hand for Hopper GPUs, for JAX and PyTorch.

``passes.py`` says which kernel runs when; gradients are by Triton's. ``forward.py`` makes the output and the log of
each query's sum: two partitions of a warpgroup multiply and make exponentials, one warp copies. The kernel
starts as many programs as it is given, each of which walks over its share of the tiles of queries; the tiles that it
holds are copied while the one before is computed.
"""

# Before the kernels, which import what versions that are not known may lack.
from keraunos.kernels.linear_attention.cuda import gluon_names as gluon_names
