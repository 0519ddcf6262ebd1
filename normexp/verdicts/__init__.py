"""Statistics of a study: pure functions on arrays over seeds."""
