"""The norms, one file per family, and the contract that a norm keeps."""
