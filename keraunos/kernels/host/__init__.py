"""The host code that all families and platforms share: arrays, plans of launches, sequences and their segments."""
