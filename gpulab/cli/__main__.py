"""`python -m gpulab.cli`, as `python -m gpulab`."""

import sys

from gpulab.cli import main

if __name__ == "__main__":
    sys.exit(main())
