"""Softmax attention in Gluon, scheduled by hand for Hopper GPUs, for JAX and PyTorch.

``passes.py`` says which kernel runs when. ``forward.py`` makes the output and the log of each query's sum,
``gradients.py`` what follows from the output's gradient. In both two partitions of a warpgroup multiply and make
exponentials while other warps copy; no more programs start than run at once, and each walks over tiles of queries, or
blocks of keys, the next of which are copied meanwhile. ``decode.py`` is the forward of few queries over many keys.
"""

# Before the kernels, which import what versions that are not known may lack.
from keraunos.kernels import gluon as gluon
