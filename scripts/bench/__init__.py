"""The benchmarks: `python -m scripts.bench pipeline|bus|replay|link`."""
