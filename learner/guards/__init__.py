"""Guards: signals checked before an update is applied, and actions (invariant 8).

    signals     one number for each guard and step
    errors      what stops a run, one class for each symptom
    judge       rules of configs/limits.py on those numbers: alarms, and whether the update is applied
    roll_back   back to the last good checkpoint, as a new incarnation

The policy in training, its optimizer and the channels know nothing of them.
"""

from learner.guards.errors import SilentlyWrong
from learner.guards.judge import Alarm, Guards, GuardVerdict
