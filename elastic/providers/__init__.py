"""Who gives machines and takes them away, and how a run hears of it."""
