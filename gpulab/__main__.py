"""`python -m gpulab`: the command line, if the script `gpulab` is not on the path."""

import sys

from gpulab.cli import main

if __name__ == "__main__":
    sys.exit(main())
