"""All other norms, a file per family. The rest of normexp knows none of their classes."""
