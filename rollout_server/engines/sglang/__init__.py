"""The `sglang` engine: SGLang in this process, its schedulers as children, weights applied by a loader of ours.

engine     what the rollout server calls
requests   one answer over the parts that updates cut it into; versions of its tokens (pure)
arguments  ServerArgs from the configuration
staging    the folder through which this process and its schedulers speak about an update
loader     runs inside each scheduler: copies an update into the live tensors and digests them there
receiver   runs inside the scheduler of rank 0: receives updates while it decodes (weight_bus.stage_in: engine)
receiver_link  starts it, and loads what it has staged
direct     its schedulers as members of a group of the weight bus (weight_bus.apply: direct)
layout     inverse map: which rows of which live tensor hold a Hugging Face tensor
"""
