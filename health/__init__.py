"""From facts to verdicts: who is dead, frozen, slow or wrong. Imports neither Ray nor torch."""
