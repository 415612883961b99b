"""Moves bytes between an engine's paged KV and one contiguous payload. Knows nothing of blocks, tiers or daemons."""
