"""The public operations: what each computes, its checks, its configuration."""
