"""From a command line to the cells of a study."""
