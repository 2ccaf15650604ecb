import sys

from tests.campaigns.frame import main

if __name__ == "__main__":
    sys.exit(main())
