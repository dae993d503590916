"""The linear recurrence on a pool of states: a few tokens at a time, and prompts."""
