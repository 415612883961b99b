"""Where blocks live. Synchronous and thread-safe; imports ``terracekv.kernels`` only."""
