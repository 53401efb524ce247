"""Names of recipes."""


class Float8CurrentScaling:
    """One scale for a tensor."""


class Float8BlockScaling:
    """A scale for each block."""
