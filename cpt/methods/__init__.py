"""A method is a file here and a YAML of the same name in conf/method."""
