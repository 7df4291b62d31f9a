"""The policy in training: model, sharding, attention, output head, and the memory that they take."""
