"""A window of steps of the whole run in one file for Perfetto: `--profile 3:6`, docs/howto/dashboard.md."""
