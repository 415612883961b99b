"""Lives in the engine's process. Imports ``kernels``, ``tiers.block`` and ``daemon.protocol``, nothing heavier."""
