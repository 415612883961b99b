"""The process that owns the tiers: two doors, one store, and the only asyncio. Imports ``terracekv.tiers``."""
