"""The gated delta rule in Gluon, scheduled by hand for Hopper GPUs, for JAX and PyTorch.

``passes.py`` says which kernel runs when. ``prepare.py`` inverts the products of each chunk's keys, of all chunks at
once, as ``inverse.py`` explains; ``walk.py`` has the walk that makes outputs, with the state in registers;
``adjoint.py`` the walk back, with the gradient of the state; ``gradients.py`` makes the gradients of what both have
left. Gates per token and dimension have ``dimensions_passes.py`` and the kernels whose files begin so. ``call.py`` has
what both know of a call.
"""

# Before the kernels, which import what versions that are not known may lack.
from keraunos.kernels import gluon as gluon
