"""From a YAML file and the installed plugins to an open stack."""
