"""The demo model: the pictures it learns from, its training, its export and its measurement."""
