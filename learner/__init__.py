"""Learner: take a batch, update the policy, publish the weights. One process per training device."""
