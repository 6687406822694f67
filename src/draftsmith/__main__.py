"""`python -m draftsmith` is the command `draftsmith`."""

import sys

from draftsmith.cli import main

sys.exit(main())
