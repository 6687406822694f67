"""`draftsmith doctor`: will this machine and this environment take the configured fast path?

Each check is a function that returns findings. A finding of level "bad" means that the fast path will not be taken (or
nothing will run at all), "unknown" that nobody could find out; either decides the exit code. "warn" is worth knowing.
Every finding that can be mended carries the command or the change that mends it.
"""

from draftsmith.doctor.examine import examine, healthy, verdict
from draftsmith.doctor.finding import Finding
from draftsmith.doctor.record import against, restore

__all__ = ["Finding", "against", "examine", "healthy", "restore", "verdict"]
