"""The last mile of a weight: from staging into the schedulers' live tensors.

orders    the folder through which the rollout server and its schedulers speak about an update
loader    runs inside each scheduler: carries out an order between two forwards
live      what an update copies where, and the digests of what is live
layout    inverse map: which rows of which live tensor hold a Hugging Face tensor
receiver  runs inside the scheduler of rank 0: receives updates while it decodes (weight_bus.stage_in: engine)
"""
