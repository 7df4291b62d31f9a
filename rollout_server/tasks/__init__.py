"""Tasks: from dataset rows to prompts, and from answers to samples for the reward."""

from rollout_server.tasks.task import PromptTooLong, Task, TaskError, load_tokenizer

__all__ = ["PromptTooLong", "Task", "TaskError", "load_tokenizer"]
