"""What is measured of a built network before it is trained."""
