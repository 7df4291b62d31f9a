"""The split advisor: what a run would take on another split, lag or tensor parallelism. Torch-free.

`sources` reads a run folder or a file of the pipeline benchmark; `fitting` turns it into `costs`; `simulation` runs
them on a simulated clock; `advice` compares the plans that fit. docs/howto/gpu-use.md is the page about it.
"""
