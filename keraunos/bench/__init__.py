"""What `keraunos bench` does: workloads, contestants, their check, their time, and the table and plot of it."""
