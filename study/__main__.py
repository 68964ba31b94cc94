"""``python -m study`` is ``study``."""

import sys

from study.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
