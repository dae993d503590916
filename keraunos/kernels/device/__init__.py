"""Device code in Triton that several families or platforms share, and what Triton can run."""
