"""What the kernels for CPUs share: how they are compiled, and how their work is spread over threads."""
