"""How a step is split over samples, replicas and devices, and how it draws random numbers."""
