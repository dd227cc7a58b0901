"""What several operations share: the k best of a row, the product with rows of a matrix, dispatch, benchmarks."""
