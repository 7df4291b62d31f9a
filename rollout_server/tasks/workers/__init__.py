"""Processes for code of the user: rewards, environments and programs that a policy wrote.

process     starts a child, reads its prints, kills it with all that it has started
supervisor  stands between, so that nothing outlives the child
loading     the module that a key of the configuration names
worker      the program of a worker process of any kind
frames      messages: a length, then msgpack
"""
