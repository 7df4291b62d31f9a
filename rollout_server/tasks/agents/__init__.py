"""Agents: programs that know an OpenAI endpoint and nothing of ours, as episodes.

episode    `environment.function: agent`: starts an agent for each episode, and what its end means
program    an agent as a process: its row on stdin, its reward on stdout, killed with all that it has started
endpoint   the OpenAI-compatible server in an environment process, with a key for each episode
requests   what may be asked of it
answers    turns in OpenAI's JSON, whole or as a stream

A request is a turn of the episode (environments/client.py), so tokens, logprobs and versions are recorded where every
other environment's are: in environments/session.py, beside the engine. No agent can write them.
"""
