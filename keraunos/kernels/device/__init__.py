"""Device code in Triton that several families or platforms share, and the limits of Triton."""
