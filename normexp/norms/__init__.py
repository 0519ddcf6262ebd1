"""The norms, a file per family. Start with factory, site and group; site has the contract."""
