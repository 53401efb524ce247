"""How a model is laid out over the workers of one replica, and which slice of it each one holds."""
