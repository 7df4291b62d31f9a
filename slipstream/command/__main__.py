"""`python -m slipstream.command`: `slipstream` where its script is not installed."""

import sys

from slipstream.command import main

sys.exit(main())
