"""The Triton kernels, and the sizes of a call, that several platforms of softmax attention share."""
