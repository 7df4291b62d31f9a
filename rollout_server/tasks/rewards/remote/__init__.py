"""Parts of a reward that ask a model behind an OpenAI-compatible endpoint.

asker     requests with a limit of time, retries and concurrency; what came back, as data
judge     a language model grades by a rubric: what it is asked, and what its verdict says
scoring   a reward model of another server: the same of it
remote    all such parts of a run, on a thread with an event loop of its own
"""
