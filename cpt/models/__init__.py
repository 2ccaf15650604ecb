"""Models: loading, their parts, losses."""

import logging

# peft imports bitsandbytes where it is installed, which then warns of kernels that cpt does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
