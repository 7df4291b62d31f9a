"""The last mile of a weight: from staging into the schedulers' live tensors."""
