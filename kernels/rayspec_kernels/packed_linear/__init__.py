"""Dense projections for a handful of rows on a CPU."""
