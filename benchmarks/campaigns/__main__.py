import sys

from benchmarks.campaigns.frame import main

if __name__ == "__main__":
    sys.exit(main())
