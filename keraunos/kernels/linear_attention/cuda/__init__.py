"""The gated linear recurrence in Gluon, scheduled by hand for Hopper GPUs, for JAX and PyTorch.

``passes.py`` says which kernel runs when. ``outputs.py`` walks in the order of the recurrence and makes outputs, the
queries' gradients, and the states that segments start from; ``gradients.py`` walks the other way and makes the
gradients of keys and values in one pass. In each, two partitions of a program multiply, one copies, one adds up gates,
one the gradients of gates. With gates per dimension ``dimensions.py``, ``dimensions_queries.py`` and
``dimensions_keys.py`` do so, and ``dimensions_gates.py`` has what the gates' gradients take in both. ``walk.py`` has
what the walks share, ``joins.py`` the small kernels that join programs' results. A program makes the descriptors of its
own tokens, so that lengths, strides and packed sequences are numbers of run time. Tiles have 64 or 128 dimensions:
copies read zeros after an array's own and write nothing there, and loads and stores of states are masked.
"""

# Before the kernels, which import what versions that are not known may lack.
from keraunos.kernels import gluon as gluon
