"""The learner's ranks: those of one node, and their starts over several."""
