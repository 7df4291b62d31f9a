"""Tasks: from dataset rows to prompts, and from answers to samples for the reward."""

from rollout_server.tasks.task import PromptTooLong, Task, TaskError

__all__ = ["PromptTooLong", "Task", "TaskError"]
