"""Tasks: from a dataset's row to the token ids of its prompt, and from an answer to what a reward function sees."""

from rollout_server.tasks.task import PromptTooLong, Task, TaskError

__all__ = ["PromptTooLong", "Task", "TaskError"]
