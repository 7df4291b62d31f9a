"""A local web page about one run folder or two; `python -m slipstream.view.dashboard runs/x`."""
