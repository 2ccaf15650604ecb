"""NCL, naive continual learning: further pre-training on one domain after another, nothing else.

theta_t = argmin L_lm(theta; D_t), started from theta_{t-1} (Gururangan et al., ACL 2020, in sequence). It is
the lower reference: every other method at neutral strength is this one, bit for bit."""

from cpt.methods.base import ContinualMethod


class NCL(ContinualMethod):
    """The base class as it is."""
