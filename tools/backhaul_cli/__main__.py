"""`python -m backhaul_cli`."""

import sys

from .main import main

sys.exit(main())
