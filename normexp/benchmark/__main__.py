"""`python -m normexp.benchmark`."""

import sys

from normexp.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
