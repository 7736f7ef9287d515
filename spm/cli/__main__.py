"""``python -m spm.cli``."""

import sys

from spm.cli import main

sys.exit(main())
