"""Linear attention on Hopper GPUs, in Pallas Mosaic GPU: host code is in `passes.py`, kernels in the other files.

``walk.py`` says which program does which tokens, ``program.py`` has what kernels share. ``kernels.py`` and
``starts.py`` (on ``decays.py``) are for one decay per token and head. Those for gates per dimension are
``gates_scan.py`` (on ``gates_program.py``), ``gates_starts.py``, ``gates_gradients.py`` (its chunks:
``gates_chunk.py``) and, for chunks with strong gates, ``gates_strong.py``; they share ``gates.py``. ``registers.py``,
``tiles.py`` (loads and stores), ``vectors.py`` (a thread's values in one vector) and ``products.py`` (the tensor cores)
do by hand what the compiler does worse, or longer.
"""
