"""Programs and plug-ins that use cpt as a package of your own would; see README.md for the charter."""
