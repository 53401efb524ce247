"""From facts to verdicts: which worker is frozen, which node is lost, whose state is wrong. Imports
neither Ray nor torch."""
