"""The embedded `torch` engine: continuous batching on a CPU, for small models.

engine    what the rollout server calls, and the decode thread
lane      one set of weights with its answers and KV cache
rows      book-keeping of the answers in a lane
model     the forward on fused weights
sampling  choosing tokens by counter-based random numbers
family    which model folders it serves exactly
weights   live weights, the inverse map, digests
"""
