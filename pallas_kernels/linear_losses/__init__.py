"""Cross-entropy and L1 distance of a drafter's distribution, from hidden states: no [positions, V'] array in memory.

Training needs, per position, the drafter's logits and the target's, and of both only two numbers. The plain path writes
them out and reads them several times; here they exist one tile at a time, forward and backward. What is saved is
traffic and memory; what is paid is products of the size n V' D: three in the plain path (z, p, the gradient of the
hidden states), and in the kernels six, or eight with a sequential head (z twice and p once forward; z and p again for
the gradient of the rows, and once more for that of w2). `mosaic_gpu.py` needs six in either case: it keeps the gradient
of the logits of a chunk of the vocabulary for both. `reference.py` has the traffic on paper.

Written here because what exists stops short of it: optax has losses of logits only, and tokamax's linear softmax
cross-entropy has neither a distance to a second softmax nor a low-rank addition, and returns one number for all rows.
"""
