"""Which way of learning goes with given texts: a small planned sweep, and what follows from it."""
