"""A local web page about one run folder or two; `python -m learner.report.dashboard runs/x`."""
