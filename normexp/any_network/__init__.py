"""What works on any network from outside: other norms, weights, a diagnosis. See README.md."""
