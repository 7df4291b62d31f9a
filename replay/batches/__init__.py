"""From the groups of a step to each learner rank's part of its batch. Pure and deterministic."""
