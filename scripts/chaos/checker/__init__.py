"""What became of every group of a run: `python -m scripts.chaos.checker runs/<name>` prints one line of JSON.

Nothing of replay, the learner or the weight bus is imported: a mistake there cannot hide itself here. Each rule has a
test with a journal that breaks it.
"""

from scripts.chaos.checker.rules import Report as Report
from scripts.chaos.checker.rules import check as check
from scripts.chaos.checker.rules import examine as examine
