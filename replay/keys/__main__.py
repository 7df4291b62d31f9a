"""`python -m replay.keys`: makes and changes folders of keys."""

import sys

from replay.keys import main

sys.exit(main())
