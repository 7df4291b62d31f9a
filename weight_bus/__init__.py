"""Weight bus: proven weight updates from the learner to every engine, over numbered epochs."""
