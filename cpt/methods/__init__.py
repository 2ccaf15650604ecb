"""A method is a class here, in a file of its own or of its family, and a YAML in conf/method."""
