"""Draft tree tensors (mask, positions, links) from the parents that the draft loop recorded."""
