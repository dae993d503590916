"""Device code in Triton and Gluon that several families or platforms share, and the limits of Triton."""
