"""`python -m configs.command`: `slipstream` where its script is not installed."""

import sys

from configs.command import main

sys.exit(main())
