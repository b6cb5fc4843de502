"""The op `skinny_matmul`: a weight matrix times the few columns of a decoding step."""
