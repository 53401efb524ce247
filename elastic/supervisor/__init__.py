"""The supervisor: the actor that a run belongs to, whoever has started it."""
