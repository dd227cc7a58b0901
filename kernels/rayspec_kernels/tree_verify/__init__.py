"""Which drafted nodes of a tree the target accepts: greedily, or by sampling from the target."""
